"""``holdfast.offload``: from a model and an optimizer to an engine, on a fresh directory or one to resume.

Everything that can be wrong is found before anything is written; then a fresh run gets its files and a first
commit, and a resumed one a new timeline that continues its newest whole commit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import BadInput, Damaged, ModelNotSupported, NoCommit, RunLocked, RunMismatch
from ..events import EventLog
from ..io.buffers import BufferPool
from ..io.queue import IOQueue
from ..plan.memory import predict
from ..plan.placement import Fraction, choose
from ..plan.work import StepShape
from ..state.progress import decode, restore_random_state
from ..store.files import AnyDisk
from ..store.housekeeping import restore_index
from ..store.local import LocalStore
from ..store.manifest import Manifest
from ..units import MiB, parse_bytes
from .device import open_device
from .engine import SCHEDULES, Engine, progress_of
from .measure import Measured, measure
from .preflight import Preflight, ssd_bytes
from .process import process_bytes, share_heaps
from .runtime import Step
from .setup import (
    Builder,
    Parts,
    empty_originals,
    install_resident,
    same_layouts,
    same_model,
    switch_off_cache,
)

KERNEL_BYTES = 48 * MiB
"""What a process grows by when torch's kernels run for the first time: code, tables and scratch. Measured on
x86-64 with torch 2.13."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much memory a run may take; bytes, or text such as ``"20GiB"``. None is no limit."""

    device: int | str | None = None
    host: int | str | None = None

    def host_bytes(self) -> int | None:
        return _bytes(self.host)

    def device_bytes(self) -> int | None:
        return _bytes(self.device)


def _bytes(text: int | str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise BadInput(f"budget: {error}") from error


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ssd: str | Path,
    *,
    scheduler: Any = None,
    loader: Any = None,
    blocks: nn.ModuleList | None = None,
    dtype: str = "bf16",
    device: str = "cpu",
    schedule: str = "vertical",
    order: str = "plain",
    params_on_host: Fraction = 0.0,
    optimizer_on_host: Fraction = 0.0,
    activations_on_host: Fraction = 1.0,
    budget: Budget | None = None,
    clip_norm: float | None = None,
    normalize: Literal["micro_batches", "tokens"] = "micro_batches",
    commit_every: int = 1,
    retain: int = 2,
    seed: int = 0,
    init: Callable[[nn.Module], Any] | None = None,
    sample: Any = None,
    micro_batches: int = 1,
    direct: bool = True,
    io_threads: int = 4,
    read_limit: int | None = None,
    write_limit: int | None = None,
    total_limit: int | None = None,
    update_workers: int = 2,
    events: EventLog | None = None,
    confirm: Callable[[Preflight], None] | None = None,
    disk: AnyDisk | None = None,
) -> Engine:
    """Train ``model`` with its state in the directory ``ssd``.

    ``optimizer`` is an ordinary elementwise ``torch.optim`` one over the model's parameters, which may be on
    ``meta``; it is read, never stepped. ``scheduler`` is stepped by the engine after each step, and its state
    and the ``loader``'s are part of every commit. If the directory holds a run of this model, it is resumed
    from its newest whole commit; scheduler, loader and random generators are restored.

    ``sample`` (a micro-batch as ``step`` takes it; its values do not matter) and ``micro_batches`` (per step)
    let memory be predicted before anything runs; ``"auto"`` fractions and a host ``budget`` need them. The
    host budget is the process's whole memory. ``confirm`` sees the preflight before anything is written and
    may raise.

    Raises ``BadInput`` and its kin (``ModelNotSupported``, ``OptimizerNotSupported``, ``DoesNotFit``,
    ``RunMismatch``, ``RunLocked``) with nothing written, ``Damaged`` if no commit of the run is whole.
    """
    _check_choices(schedule, order, normalize, clip_norm)
    _check_counts(
        {"commit_every": (commit_every, 0), "retain": (retain, 1), "micro_batches": (micro_batches, 1),
         "io_threads": (io_threads, 1), "update_workers": (update_workers, 1)},
        {"read_limit": read_limit, "write_limit": write_limit, "total_limit": total_limit},
    )  # fmt: skip
    _check_stateful(scheduler, loader)
    _check_directory(ssd, disk)
    parts = Parts.of(model, optimizer, dtype, blocks)
    target = open_device(device)
    shape = StepShape(micro_batches=micro_batches, clip=clip_norm is not None, commit=commit_every > 0)
    work = parts.work(_measured(parts, sample), target.unified)
    host_budget, held = (budget or Budget()).host_bytes(), process_bytes() + KERNEL_BYTES
    placement = choose(
        work,
        shape,
        host_budget,
        params=params_on_host,
        optimizer=optimizer_on_host,
        activations=activations_on_host,
        schedule=SCHEDULES[schedule],
        held_bytes=held,
    )
    memory = predict(work, placement, shape, SCHEDULES[schedule])
    read, written = ssd_bytes(SCHEDULES[schedule](work, placement, shape))
    queue = IOQueue(io_threads, read_limit, write_limit, total_limit)
    store = engine = None
    try:
        store = LocalStore(
            ssd, retain=retain, spare=1 if commit_every == 1 else 2, disk=disk, queue=queue, direct=direct
        )
        fresh = not store.commits()
        if not fresh:
            store.enter()
        found = None if fresh else _newest(store, parts)
        pool = BufferPool(None)
        builder = Builder(parts, store, target, pool, placement, retain + store.spare)
        if found is not None:
            same_layouts(builder, found)
        spilled = (
            sum(not on_host for on_host in placement.activations[:-1]) * micro_batches * work.input_bytes
        )
        preflight = Preflight(
            directory=str(ssd),
            parameters=sum(p.parameter.numel() for p in parts.captured.parameters),
            state_bytes=sum(unit.layout.file_bytes for unit in parts.all_units),
            needed_bytes=builder.space_needed(shape.clip, schedule == "horizontal", spilled),
            free_bytes=store.free_bytes(),
            read_bytes_per_step=read,
            written_bytes_per_step=written,
            host_bytes_predicted=None if sample is None else held + memory.host_bytes,
            host_budget=host_budget,
            device_bytes_predicted=None if sample is None or target.unified else memory.device_bytes,
            device_budget=None if target.unified else (budget or Budget()).device_bytes(),
            block_names=tuple(unit.name for unit in parts.units),
        )
        preflight.check()
        if confirm is not None:
            confirm(preflight)
        publish: list[Callable[[Step], None]] = []
        if found is None:
            progress_of(optimizer, scheduler, loader)  # whatever cannot be stored is refused now
        else:
            _restore(found, optimizer, scheduler, loader)
        if fresh:  # until here a directory that was not there is not there
            _enter_fresh(store)
        switch_off_cache(model)
        share_heaps()
        store.begin(found)
        builder.create_files()
        run = builder.build(model, seed, lambda step: publish[0](step))
        if found is None:
            builder.fill_fresh(run, init, seed)
        else:
            builder.fill_from(run, found)
        were_real = {p.name: not p.parameter.is_meta for p in parts.captured.parameters}
        engine = Engine(
            run, parts, work, preflight,
            optimizer=optimizer, scheduler=scheduler, loader=loader, schedule=schedule, clip_norm=clip_norm,
            commit_every=commit_every, normalize=normalize, update_workers=update_workers,
            events=events or EventLog(None), were_real=were_real,
        )  # fmt: skip
        publish.append(engine.publish)
        _continue(engine, optimizer, found)
        empty_originals(parts)
        install_resident(run)
        target.take_buffers(model)
        return engine
    except BaseException:
        if engine is not None:
            engine.give_up()
        queue.close()  # nothing is under way any more when the lock goes
        if store is not None:
            store.close()
        raise


def _check_choices(schedule: str, order: str, normalize: str, clip_norm: float | None) -> None:
    for name, value, allowed in (
        ("schedule", schedule, tuple(SCHEDULES)),
        ("order", order, ("plain",)),
        ("normalize", normalize, ("micro_batches", "tokens")),
    ):
        if value not in allowed:
            raise BadInput(f"{name} = {value!r} is not one of {', '.join(allowed)}")
    if clip_norm is not None and not clip_norm > 0:
        raise BadInput(f"clip_norm = {clip_norm} must be positive; None is no clipping")


def _check_counts(at_least: dict[str, tuple[int, int]], rates: dict[str, int | None]) -> None:
    for name, (count, least) in at_least.items():
        if count < least:
            raise BadInput(f"{name} = {count} must be at least {least}")
    for name, rate in rates.items():
        if rate is not None and rate <= 0:
            raise BadInput(f"{name} = {rate} must be positive, in bytes per second; None is no limit")


def _check_stateful(scheduler: Any, loader: Any) -> None:
    """What belongs to a commit can be stored and restored, and the scheduler stepped by the engine."""
    for name, thing in (("scheduler", scheduler), ("loader", loader)):
        kind = type(thing).__name__
        if thing is not None and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            instead = (
                " holdfast.loader(dataset, batch_size) is a loader that has." if name == "loader" else ""
            )
            raise BadInput(
                f"{name}: {kind} has no state_dict and load_state_dict, so a resume would lose it.{instead}"
            )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise BadInput(
            "ReduceLROnPlateau needs a metric at each step, and the engine has none to give: do not pass it as "
            "scheduler=, step it yourself."
        )


def _check_directory(ssd: str | Path, disk: AnyDisk | None) -> None:
    if disk is None and Path(ssd).exists() and not Path(ssd).is_dir():
        raise BadInput(f"{ssd} is a file. Give a directory for the run; it is made if it is not there.")


def _enter_fresh(store: LocalStore) -> None:
    """Make the directory and take its lock. Raises ``RunLocked`` if somebody has begun a run there since."""
    store.enter()
    if store.commits():
        raise RunLocked(
            f"{store.root} got a run from another process a moment ago. Run again to continue that one."
        )


def _measured(parts: Parts, sample: Any) -> Measured | None:
    """What a micro-batch takes; None, with a warning, where the model cannot be traced."""
    if sample is None:
        return None
    try:
        return measure(parts.model, parts.blocks, sample, parts.resident.dtype)
    except ModelNotSupported as error:
        warnings.warn(f"memory is not predicted: {error}", stacklevel=3)
        return None


def _newest(store: LocalStore, parts: Parts) -> Manifest | None:
    """The newest whole commit to continue, or None for a fresh run. Warns about commits passed over."""
    if not store.commits():
        return None
    for problem in restore_index(store, parts.index()):
        warnings.warn(f"the model says the same, so it was written anew: {problem}", stacklevel=3)
    readable = _newest_readable(store)
    if readable is not None:
        same_model(parts, store, readable)
    manifest, damaged = store.newest_whole()
    for problem in dict.fromkeys(map(str, damaged)):
        warnings.warn(f"resuming from step {manifest.step} in spite of damage: {problem}", stacklevel=3)
    same_model(parts, store, manifest)
    return manifest


def _newest_readable(store: LocalStore) -> Manifest | None:
    """The newest commit that says what it holds; its data may be damaged."""
    for ref in store.line():
        with suppress(Damaged, NoCommit):
            manifest = store.load(ref)
            store.atoms(manifest)
            return manifest
    return None


def _restore(found: Manifest, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """Put hyper-parameters, scheduler and loader where the commit had them. Raises ``RunMismatch``."""
    progress = found.progress
    if len(progress["groups"]) != len(optimizer.param_groups):
        raise RunMismatch(
            f"the run's optimizer has {len(progress['groups'])} parameter groups, this one has "
            f"{len(optimizer.param_groups)}. Build it with the groups that the run was made with."
        )
    theirs, ours = progress.get("optimizer"), type(optimizer).__name__
    if theirs not in (None, ours):
        raise RunMismatch(
            f"the run was made with {theirs}, this optimizer is {ours}. Use {theirs}, or another directory."
        )
    for group, saved in zip(optimizer.param_groups, progress["groups"], strict=True):
        group.update({key: decode(value) for key, value in saved.items()})
    for name, thing in (("scheduler", scheduler), ("loader", loader)):
        if thing is not None and name in progress:
            thing.load_state_dict(decode(progress[name]))


def _continue(engine: Engine, optimizer: Any, found: Manifest | None) -> None:
    """A resumed engine counts on from its commit; a fresh one gets its first."""
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        optimizer._opt_called = True  # the engine steps for it, so its scheduler need not warn
    if found is None:
        engine.publish_first()
        return
    engine.steps_done = engine.durable_step = engine.resumed_from = found.step
    engine.skipped_steps = found.progress.get("skipped_steps", 0)
    restore_random_state(decode(found.progress["random"]))
