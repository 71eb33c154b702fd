"""The saving half of ``integrations.deepspeed``: each rank writes its ranges, straight from its flat partitions.

Of tensors that several ranks hold (frozen parameters of stages 1 and 2) one rank writes; buffers are written by the
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.snapshot.snapshot_chunks import divided, of_one_base
from ..checkpoint.snapshot.snapshot_image import SnapshotImage
from ..checkpoint.snapshot.snapshot_writer import settle_devices
from ..distributed import Ranks, stream_of
from ..errors import OptimizerNotSupported
from ..state.capture import aliases_of
from ..state.encoding import encode
from ..state.layout.zero import Partition, PartitionMember
from ..state.live_state import BUFFERS, Held
from ..state.progress import hyper_parameters, random_state
from ..store.commit.commit_writer import Written
from ..store.commit.retention import Keep
from ..store.format.manifest import Timeline
from ..store.run_store import LocalStore
from .shared.collective_commit import OpenedRun, joined_run, unit_of
from .zero_state import ShownState, shown_number

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
