"""The start of a live DeepSpeed engine of ZeRO-1, 2 or 3 from any source, and its saving.

The source may have another stage and world size.

    from holdfast.integrations.deepspeed import load, save

    engine, *_ = deepspeed.initialize(...)
    start = load(engine, "ds_run")  # or a run, RUN@STEP, a universal, DCP or Hugging Face folder, holdfast.From(...)
    save(engine, "runs/x")  # a commit of a run, which is a source for everything else

Both functions are collectives. Each rank reads and writes what its own partitions hold. The ranks together verify
everything that is read before a tensor of the engine is touched. Of tensors that several ranks hold (frozen parameters
of stages 1 and 2) one rank writes; buffers are written by the first.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.rank_consistency import seen_together
from ..checkpoint.snapshot.snapshot_chunks import divided, of_one_base
from ..checkpoint.snapshot.snapshot_image import SnapshotImage
from ..checkpoint.snapshot.snapshot_writer import settle_devices
from ..checkpoint.user_state import ScriptState
from ..distributed import Ranks, stream_of
from ..errors import BadInput, OptimizerNotSupported
from ..formats.entry_matching import Match
from ..formats.restore import matched, needs_of, restore
from ..formats.source import Source
from ..sources import NO_RANDOM, NOT_ALL_GROUPS, From, check_between, differences_from, opened_alike
from ..state.capture import aliases_of
from ..state.encoding import encode
from ..state.layout.zero import Partition, PartitionMember
from ..state.live_state import BUFFERS, Held
from ..state.progress import hyper_parameters, random_state
from ..store.commit.commit_writer import Written
from ..store.commit.retention import Keep, refuse_best, refuse_weights
from ..store.format.manifest import Timeline
from ..store.run_store import LocalStore
from .shared.collective_commit import OpenedRun, check_step, joined_run, unit_of
from .zero_state import ShownState, numbers_of, put_back, refresh, show, shown_number, unsupported_messages

__all__ = ["load", "save"]
DEADLINE_SECONDS = 300.0
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The changing fields of DeepSpeed's dynamic loss scale."""


def load(engine: Any, source: str | Path | From, *, deadline_seconds: float = DEADLINE_SECONDS) -> int:
    """Bring ``engine`` to the state of ``source``, and return the step. Collective: every rank must call this.

    A rank waits for the others for at most ``deadline_seconds``. On return every rank computes with the loaded state:
    parameters (frozen ones and buffers too), the optimizer's state and hyper-parameters, the learning-rate schedule,
    the engine's counters, and random numbers if the source has them. Differences from the source cause warnings.

    Raises ``ModelNotSupported`` and related errors for an engine whose state is not known, ``RunMismatch`` if the
    source belongs to another model, ``Damaged`` if it is damaged: on all ranks, with no engine changed. A file that is
    rewritten while the last of it is read also raises ``Damaged``; the engine must then be filled again.
    """
    start = source if isinstance(source, From) else From(source)
    ranks = Ranks.here(deadline_seconds, "load their engine")
    try:
        shown = _seen(engine, ranks)
        return _load(shown, start, opened_alike(start, ranks), ranks)
    finally:
        ranks.close()


def save(
    engine: Any,
    run: str | Path,
    *,
    step: int | None = None,
    keep: Keep | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> int:
    """Make the state of ``engine`` a commit of the run in ``run``, and return its step.

    Collective: every rank must call this. All ranks must see the directory, which is created if absent. On return the
    commit survives power loss. A step that exists already, or has later steps, begins another timeline, as a resume
    from it does.

    Args:
        engine: The engine.
        run: The directory of the run.
        step: The step of the commit; None means that of the engine.
        keep: Tells which commits stay.
        deadline_seconds: How long a rank waits for the others.

    Raises ``ModelNotSupported`` and related errors for an engine whose state is not known, ``RunMismatch`` if something
    else wrote the run, ``DiskFull`` and ``DiskFailed``: on all ranks, with no commit made.
    """
    check_step(step)
    keep = keep or Keep()
    refuse_best(keep, "a saved engine")
    refuse_weights(keep, "a saved engine")
    ranks = Ranks.here(deadline_seconds, "save their engine")
    try:
        shown = _seen(engine, ranks)
        number = _alike(ranks.everyone(engine.global_steps if step is None else step))
        write(shown, run, number, keep, ranks, _version())
        return number
    finally:
        ranks.close()


def _alike(steps: list[int]) -> int:
    if len(set(steps)) > 1:
        raise BadInput(f"the ranks would save different steps: {steps}. Call save on all of them at once.")
    return steps[0]


def _version() -> str:
    return str(getattr(sys.modules.get("deepspeed"), "__version__", "of no version"))


def _seen(engine: Any, ranks: Ranks) -> ShownState:
    """Return the state of ``engine``, after checking that all ranks together hold each element once."""
    made: list[ShownState] = []

    def make() -> Any:
        made.append(show(engine, _version()))
        return made[0].state

    seen_together(ranks, make)
    return made[0]


def _load(shown: ShownState, start: From, source: Source, ranks: Ranks) -> int:
    check_between(ranks, source, start.place, partial(needs_of, shown.state, source, start))
    with ranks.agreeing():
        numbers = numbers_of(shown, source, matched(shown.state, source, start))
    with ranks.agreeing():
        found, messages = _bring(shown, source, start, ranks.rank)
    put_back(shown, numbers, found)
    refresh(shown)
    step = _count(shown.engine, source)
    for text in messages + _scale(shown.engine.optimizer, source):
        warnings.warn(f"beginning from {source.path} ({source.format}): {text}", stacklevel=3)
    return step


def _bring(shown: ShownState, source: Source, start: From, rank: int) -> tuple[Match, list[str]]:
    """Restore the engine; return the match and a message for each difference."""
    scheduler = shown.engine.lr_scheduler
    script = ScriptState([shown.beside], {} if scheduler is None else {"scheduler": scheduler})
    adopted = script.adopt(source.progress, rank)  # before the restore, as a schedule may refuse its state
    found, complete = restore(shown.state, source, start)
    messages = differences_from(found, source) + adopted + unsupported_messages(shown.base, shown.beside)
    if not complete:
        messages.append(NOT_ALL_GROUPS)
    if source.progress.get("step") and "random" not in source.progress:
        messages.append(NO_RANDOM)
    return found, messages


def _count(engine: Any, source: Source) -> int:
    """Set the engine's counters to those of ``source``, and return the step."""
    step = source.progress.get("step") or 0
    extra = source.progress.get("extra") or {}
    engine.global_steps = step
    samples, skipped = (extra.get(name) for name in ("global_samples", "skipped_steps"))
    engine.global_samples = samples if isinstance(samples, int) else step * engine.train_batch_size()
    engine.skipped_steps = skipped if isinstance(skipped, int) else 0
    engine.micro_steps = step * engine.gradient_accumulation_steps()
    return step


def _scale(optimizer: Any, source: Source) -> list[str]:
    """Set a dynamic loss scale to that of ``source``; return messages about it."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return []
    there = (source.progress.get("extra") or {}).get("loss_scaler")
    fields = there.get("fields", there) if isinstance(there, Mapping) else {}
    moving = {key: fields[key] for key in SCALE if isinstance(fields.get(key), int | float)}
    if "cur_scale" not in moving:
        return ["it has no dynamic loss scale; that of the engine goes on as it is"]
    vars(scaler).update({key: value for key, value in moving.items() if hasattr(scaler, key)})
    return []


ENGINE = "deepspeed_engine"
"""The key in a commit's progress that names the writer."""


def write(shown: ShownState, run: str | Path, step: int, keep: Keep, ranks: Ranks, version: str) -> None:
    """Make the state a commit of ``run``, durable on return. Collective: every rank must call this."""
    with ranks.agreeing():
        show_state(shown)
    opened: list[OpenedRun] = []

    def open_run() -> dict[str, Any]:
        opened.append(OpenedRun(run, keep, step, lambda told: ENGINE in told, "integrations.deepspeed.save"))
        return asdict(opened[0].store.opened)

    stores: list[LocalStore] = []
    try:
        timeline = Timeline(**ranks.first_does(open_run))

        def write_share() -> dict[str, Any]:
            stores.append(opened[0].store if opened else joined_run(run, keep, timeline, ranks.rank))
            return _share(stores[0], shown, step, unit_of(step, timeline.id, ranks.rank), version, ranks.rank)

        shares = ranks.all_do(write_share)
        refs = {stream_of(rank): ref for rank, ref in enumerate(shares)}
        with ranks.agreeing():
            if opened:
                opened[0].store.publish_shares(refs)
    finally:
        for store in stores if not opened else ():
            store.close()
        for run_of_first in opened:
            run_of_first.close()


def show_state(shown: ShownState) -> None:
    """Give the optimizer beside DeepSpeed's views of DeepSpeed's state.

    Raises ``OptimizerNotSupported`` for state that is neither elementwise nor one value for all elements.
    """
    for partition in shown.partitions:
        if partition.group is not None:
            held = shown.base.state.get(partition.master, {})
            for name, member in shown.names(partition):
                if member.stretch.elements:
                    parameter = shown.state.parameter(name).parameter
                    shown.beside.state[parameter] = _views(shown.base, held, partition, member)


def _views(
    base: torch.optim.Optimizer, held: Mapping[str, Any], partition: Partition, member: PartitionMember
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for slot, value in held.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            found[slot] = shown_number(base, value)
        elif value.shape == partition.master.shape:
            found[slot] = value.narrow(0, member.offset, member.stretch.elements)
        else:
            raise OptimizerNotSupported(
                f"the optimizer keeps {slot!r}, {list(value.shape)}, for {partition.master.numel()} elements together,"
                " which is neither of each element nor one number. Use one of torch's, such as AdamW."
            )
    return found


def _share(
    store: LocalStore, shown: ShownState, step: int, name: str, version: str, rank: int
) -> dict[str, Any]:
    """Write what a rank stores, and return the reference of its share of the commit. Durable on return."""
    state = shown.state
    owned: dict[str, Held] = {p.name: state.owned(p) for p in state.stored if not state.lacks(p.name)}
    if rank == 0 and (buffers := state.buffers()):
        owned[BUFFERS] = buffers
    units, index = divided(owned, state, f"{name}.")
    files: Written = {}
    for unit in units:
        tensors = unit.tensors_of(owned)
        settle_devices(tensors.values())
        files[unit.name] = store.write_unit(unit.name, unit.layout, SnapshotImage(unit.layout, tensors).fill)
    progress = _progress(shown, version)
    return store.share(
        step,
        files,
        store.put_index(of_one_base(index, store.timeline, step, f"{name}.")),
        progress,
        dict.fromkeys(files, step),
    ).ref


def _progress(shown: ShownState, version: str) -> dict[str, Any]:
    """Return what is no tensor, as JSON."""
    engine, state = shown.engine, shown.state
    groups = shown.beside.param_groups
    told: dict[str, Any] = {
        ENGINE: {"version": version, "stage": int(engine.zero_optimization_stage())},
        "optimizer": type(shown.base).__name__,
        "groups": hyper_parameters(groups),
        "group_parameters": [[state.name_of[id(p)] for p in group["params"]] for group in groups],
        "random": encode(random_state()),
        "aliases": aliases_of(state.parameters),
        "values": state.values(),
        "extra": {
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "train_batch_size": engine.train_batch_size(),
        },
    }
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        told["extra"]["loss_scaler"] = {key: value for key, value in vars(scaler).items() if _is_plain(value)}
    if engine.lr_scheduler is not None:
        told["scheduler"] = encode(engine.lr_scheduler.state_dict(), "scheduler")
    return told


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
