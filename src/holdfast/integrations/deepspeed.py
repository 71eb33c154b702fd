"""The start of a live DeepSpeed engine of ZeRO-1, 2 or 3 from any source, and its saving.

The source may have another stage and world size.

    from holdfast.integrations.deepspeed import load, save

    engine, *_ = deepspeed.initialize(...)
    start = load(engine, "ds_run")  # or a run, RUN@STEP, a universal, DCP or Hugging Face folder, holdfast.From(...)
    save(engine, "runs/x")  # a commit of a run, which is a source for everything else

Both functions are collectives. Each rank reads and writes what its own partitions hold. The ranks together verify
everything that is read before a tensor of the engine is touched.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.rank_consistency import seen_together
from ..checkpoint.user_state import ScriptState
from ..distributed import Ranks
from ..errors import BadInput
from ..formats.entry_matching import Match
from ..formats.restore import matched, needs_of, restore
from ..formats.source import Source
from ..sources import NO_RANDOM, NOT_ALL_GROUPS, From, check_between, differences_from, opened_alike
from ..store.commit.retention import Keep, refuse_best, refuse_weights
from .shared.collective_commit import check_step
from .zero_save import write
from .zero_state import ShownState, numbers_of, put_back, refresh, show, unsupported_messages

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
        found, told = _bring(shown, source, start, ranks.rank)
    put_back(shown, numbers, found)
    refresh(shown)
    step = _count(shown.engine, source)
    for text in told + _scale(shown.engine.optimizer, source):
        warnings.warn(f"beginning from {source.path} ({source.format}): {text}", stacklevel=3)
    return step


def _bring(shown: ShownState, source: Source, start: From, rank: int) -> tuple[Match, list[str]]:
    """Restore the engine; return the match and a message for each difference."""
    scheduler = shown.engine.lr_scheduler
    script = ScriptState([shown.beside], {} if scheduler is None else {"scheduler": scheduler})
    adopted = script.adopt(source.progress, rank)  # before the restore, as a schedule may refuse its state
    found, complete = restore(shown.state, source, start)
    told = differences_from(found, source) + adopted + unsupported_messages(shown.base, shown.beside)
    if not complete:
        told.append(NOT_ALL_GROUPS)
    if source.progress.get("step") and "random" not in source.progress:
        told.append(NO_RANDOM)
    return found, told


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
