"""``holdfast.offload``: from a model and an optimizer to an engine, in a fresh directory or one to resume.

Arguments, model and space are checked before anything is written. Then a fresh run gets its files and a first commit,
and a resumed run a new timeline that continues its newest whole commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..distributed import Ranks
from ..errors import BadInput, HoldfastError, RunLocked
from ..events import EventLog, describe_lost_steps, tell
from ..io.queue import IOQueue
from ..optim.torch_threads import keep_torch_threads
from ..store.commit.generations import Generations
from ..store.disk import AnyDisk
from ..store.format.manifest import Manifest
from ..store.format.reference_files import Reference
from ..store.run_store import LocalStore, begin, see_alike
from ..supervised.attempt import Witness, in_drill, training_directory
from ..supervised.standing_by import say_opened, wait_for_run
from .data_parallel import DataParallelGroup
from .engine import Engine
from .exit_hook import deferred
from .model.model_parts import ModelParts
from .model.quantised_layers import close_layer, is_quantised
from .model.takeover import (
    refuse_emptied,
    refuse_held,
    refuse_partly_empty,
    switch_off_cache,
    switch_on_cache,
)
from .offload_options import IO, Clipping, Durability, Placement, Precision
from .runtime import Runtime
from .setup.builder import build, fill, stored_units
from .setup.drive_setup import Drives
from .setup.engine_resume import newest_commit, progress_of_rank, same_files
from .setup.frozen_references import frozen_references
from .setup.preflight import Preflight, preflight_of, space_on
from .setup.process_settings import allow_open_files, on_host_by_default, share_heaps
from .setup.run_planning import (
    Arguments,
    PlannedRun,
    agreed_run,
    checked_arguments,
    keeps_dtype,
    plan_run,
)
from .setup.starting_state import (
    Opens,
    StartingState,
    agree_on_held,
    agree_on_source,
    check_forms,
    prepare,
    take_up,
)
from .setup.step_planning import Budget


@on_host_by_default
def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: str | Path,
    *,
    scheduler: Any = None,
    loader: Any = None,
    source: Opens | None = None,
    init: Callable[[nn.Module], Any] | None = None,
    seed: int = 0,
    blocks: Sequence[nn.Module] | nn.ModuleList | None = None,
    device: str = "cpu",
    precision: str | Precision = "auto",
    budget: Budget | Literal["auto"] | None = None,
    placement: Placement = Placement(),  # noqa: B008 - frozen
    schedule: str = "vertical",
    order: str = "plain",
    clipping: float | Clipping | None = None,
    normalize: Literal["micro_batches", "tokens", "sum"] | Callable[[Any], float] = "micro_batches",
    sample: Any = None,
    micro_batches: int = 1,
    loss_fn: Callable[..., Any] | None = None,
    durability: Durability = Durability(),  # noqa: B008
    io: IO = IO(),  # noqa: B008
    deadline_seconds: float = 300.0,
    events: EventLog | None = None,
    confirm: Callable[[Preflight], None] | None = None,
    before_first_commit: Callable[[], object] | None = None,
    say: Callable[[str], object] | None = None,
    disk: AnyDisk | None = None,
) -> Engine:
    """Train ``model`` with its state in the directory ``run``.

    A fresh directory begins a run. If the directory holds a run of this model, that run is resumed from its newest
    whole commit. Scheduler, loader, random generators and the hyper-parameters in the groups of ``optimizer`` are
    restored, so change a learning rate after this call. All other arguments may change from one resume to the next. A
    warning is given for changes after which the numbers differ from those of an uninterrupted run: of ``seed``,
    ``precision``, the norm of ``clipping``, ``order``, ``normalize``, or to or from clipping per block. A warning is
    also given for a hyper-parameter that was changed before this call, because the run's own value is kept.

    Args:
        model: The model. Its parameters may be on ``meta``.
        optimizer: One of ``torch.optim`` or ``holdfast.optim`` over the model's parameters; it is read, never stepped.
            One thread computes what needs whole matrices (Muon, APOLLO, Grass, Adafactor), so the bits are those of a
            loop with one thread. ``holdfast.optim.MeZO`` has steps of forward passes alone.
        run: The directory. With ``io=IO(drives=...)`` the state is on further SSDs too.
        scheduler: Stepped by the engine after each step, unless its ``step`` takes a metric: then the script steps it.
            Its state is part of every commit.
        loader: A data loader whose state is part of every commit.
        source: State from which a fresh directory begins: ``holdfast.From`` another run (of a ``Checkpointer`` of any
            parallelism, or of another engine) or a state of another library, read unit by unit. A directory that has a
            run continues that run.
        init: Function that initialises what one module itself holds, for parameters on ``meta``. By default
            ``reset_parameters`` and the model's ``_init_weights`` do.
        seed: Seed of ``init`` and of random numbers inside blocks.
        blocks: Modules that are streamed, one at a time: a list of modules of the model, in the order in which they
            run, for example those of an encoder and of a decoder. By default the ``nn.ModuleList`` of one class, or
            of classes that repeat, with most bytes of parameters. A warning is given if that leaves more than half in
            memory and there is another list.
        device: Where blocks are computed: "cpu", "cuda", "cuda:1".
        precision: Dtype of the compute copy, or a ``Precision`` with the loss scale of fp16. "auto" is that of the run;
            for a fresh one bf16, or fp32 on a processor that is measured to be faster in it
            (``engine.preflight.dtype``).
        budget: Memory that the run may take. The host budget is for the whole process, evaluations included. ``"auto"``
            is the memory that is free, and lets the planner choose the fractions of ``placement`` that are not given.
        placement: Fractions of the state that stay in memory.
        schedule: "vertical": each block takes all micro-batches before the next block; "horizontal": each micro-batch
            goes through the whole model.
        order: ``"snake"`` reverses the order of the micro-batches in every other block, so that the tensors between two
            blocks stay on the device at every turn, which saves three transfers. The gradients of these blocks are
            summed in reverse order, so from three micro-batches on they differ from an ordinary loop's in their last
            bits.
        clipping: Bound of the gradient norm, or a ``Clipping`` that also says how.
        normalize: What a micro-batch counts in the step's gradient: all the same; or with ``"tokens"`` its target
            tokens that are not -100 in ``"targets"`` or ``"labels"``; or a function from a micro-batch to its number;
            with ``"sum"`` the losses are added as they are, for losses that are divided already. A model that shifts
            labels does not count the first label of each row; whether it does is found out once, by a forward pass of
            two micro-batches.
        sample: A micro-batch as ``step`` takes it (a tuple needs its ``loss_fn``); its values do not matter. With
            ``micro_batches``, the number per step, it lets memory be predicted before anything runs. ``"auto"``
            fractions and a ``budget`` need both.
        durability: How often the state is committed, and what is kept.
        io: Drives, limits of rates, threads.
        deadline_seconds: Longest time that a rank waits for another.
        events: Event log of the run; by default ``events.jsonl`` in its directory, none with ``EventLog(None)``.
        confirm: Called with the preflight before anything is written; it may raise.
        before_first_commit: Called once in a fresh directory, which is locked by then, for files to be kept beside the
            state. No commit of the run exists without them.
        say: Called with the line that tells what was chosen; by default it is logged, as that of a resume is.
        disk: File system of the run in place of that of ``run``, for tests.

    The planner uses the machine's rates, which are measured in a few seconds where they are not known yet, and the
    times of the model's own block. Its choice and the resource that binds are an event ("plan") and a line for ``say``.

    Collective where torch.distributed is in use: every rank must call this, with one directory for all. Training is
    data-parallel then (``docs/fits.md``, "Several ranks"). A step whose loss is not finite is skipped
    (``docs/schedule.md``). Every value must go through a block's arguments and its return value; "A model of your own"
    in ``docs/fits.md`` says what is refused otherwise, and what is not detected.

    Raises ``BadInput`` and its subclasses (``ModelNotSupported``, ``OptimizerNotSupported``, ``DoesNotFit``,
    ``RunMismatch``, ``RunLocked``) with nothing written, ``Damaged`` if no commit of the run is whole, and
    ``RankFailed`` if another rank fails or does not come. With several ranks, an error after files were created (in
    ``init``, or of a full disk) leaves them behind without a commit: remove the directory.
    """
    io = replace(io, drives=()) if in_drill() else io
    given = Arguments(
        model=model, optimizer=optimizer, place=training_directory(run) if disk is None else run, scheduler=scheduler,
        loader=loader, source=source, init=init, seed=seed, blocks=blocks, device=device,
        precision=Precision.of(precision), budget=budget, placement=placement, schedule=schedule, order=order,
        clipping=Clipping.of(clipping), normalize=normalize, sample=sample, micro_batches=micro_batches,
        loss_fn=loss_fn, durability=durability, io=io, events=events, confirm=confirm,
        before_first_commit=before_first_commit, say=say, disk=disk,
    )  # fmt: skip
    data_parallel = DataParallelGroup.here(deadline_seconds)
    with _undone_on_error(data_parallel) as made:
        made.quantised = [module for module in model.modules() if is_quantised(module)]
        given = checked_arguments(given, data_parallel)
        drives = Drives.of(given.place, io.drives, io.limits, say, data_parallel.control)
        planned = plan_run(given, drives, data_parallel)
        planned = agreed_run(given, planned, data_parallel)
        wait_for_run(given.place, data_parallel.control, deadline_seconds)
        if not keeps_dtype(given, planned, data_parallel.control):  # another process has begun the run since
            planned = agreed_run(given, plan_run(given, drives, data_parallel), data_parallel)
        store = _open_store(given, planned.drives, made)
        with data_parallel.control.agreeing():
            references = frozen_references(given.source, planned.parts, store, alone=data_parallel.alone)
        found = _found(store, planned.parts, data_parallel.control)
        start = _ready(given, planned, store, found, references, data_parallel.control)
        runtime = _filled_runtime(given, planned, store, start, made)
        return _opened_engine(given, planned, runtime, start, made)


@dataclass(frozen=True)
class _Start:
    """The state from which the runtime is filled, and the files that hold it."""

    found: Manifest | None
    """The commit that is continued; None in a fresh run."""
    beginning: StartingState | None
    """The state of another run or library from which a fresh run begins."""
    stored: dict[str, Generations]
    """The files of every unit."""
    preflight: Preflight


@dataclass
class _Made:
    """The parts of an engine that a call of ``offload`` has made so far."""

    data_parallel: DataParallelGroup
    queue: IOQueue | None = None
    store: LocalStore | None = None
    names_before: set[str] | None = None
    """The names in the directory before a fresh run was begun there; None if its files are to be left."""
    caches: list[Any] = field(default_factory=list)
    """The configurations whose key-value cache was switched off."""
    runtime: Runtime | None = None
    engine: Engine | None = None
    quantised: list[nn.Module] = field(default_factory=list)
    """The quantised layers of the model that were not open."""

    def undo(self, error: BaseException) -> None:
        """Release everything. The files of a fresh run are removed if ``error`` is a refusal."""
        self.data_parallel.close()  # so that ranks that wait for this one need not
        switch_on_cache(self.caches)
        if self.engine is not None:
            self.engine.give_up()
        if self.queue is not None:
            self.queue.close()  # nothing is under way any more when the lock is released
        if self.runtime is not None and self.engine is None:
            self.runtime.residency.release()
        for layer in self.quantised:
            close_layer(layer)
        if self.store is None:
            return
        refusal = isinstance(error, BadInput) or not isinstance(error, HoldfastError)
        try:
            if self.names_before is not None and self.engine is None and refusal:
                with suppress(HoldfastError):  # its error would hide this one
                    self.store.withdraw(self.names_before)
        finally:
            self.store.close()


@contextmanager
def _undone_on_error(data_parallel: DataParallelGroup) -> Iterator[_Made]:
    """Release on an error the parts that the body has noted."""
    made = _Made(data_parallel)
    try:
        yield made
    except BaseException as error:
        made.undo(error)
        raise


def _open_store(given: Arguments, drives: Drives, made: _Made) -> LocalStore:
    """Open the store in the directory of the run, with the threads that move its bytes. Writes nothing."""
    keep_torch_threads()
    with deferred():  # no interrupt may come between the threads and the code that ends them
        made.queue = drives.queue(given.place, given.io.threads, given.io.limits)
    made.store = LocalStore(
        given.place, retain=given.durability.retain, spare=1 if given.durability.commit_every == 1 else 2,
        disk=given.disk, queue=made.queue, direct=given.io.direct,
    )  # fmt: skip
    return made.store


def _found(store: LocalStore, parts: ModelParts, ranks: Ranks) -> Manifest | None:
    """Return the commit to continue, with the progress of this rank; None in a fresh directory.

    The first rank searches. Collective: every rank must call this.
    """

    def newest() -> Manifest | None:
        if not store.commits():
            return None
        store.enter()
        return newest_commit(store, parts.unsharded())

    with ranks.agreeing():
        found = ranks.first_takes_its_time(newest)  # every byte of the commit is read
    ref = ranks.everyone(None if found is None else found.ref)[0]
    if ref is None:
        return None
    with ranks.agreeing():
        return progress_of_rank(found or store.load(ref), ranks)


def _ready(
    given: Arguments,
    planned: PlannedRun,
    store: LocalStore,
    found: Manifest | None,
    references: Mapping[str, Reference],
    ranks: Ranks,
) -> _Start:
    """Check everything else, restore the user state of ``found``, and hold the lock of the directory.

    A fresh directory is created only after all checks have passed. Collective: every rank must call this.
    """
    stored, preflight = _preflight(given, planned, store, found, references, ranks)
    beginning = None
    if found is None:
        beginning = _begin_fresh(given, planned, store, ranks)
    else:
        with ranks.agreeing():
            planned.user.show_all([found.progress_of(stream) for stream in found.streams])
            planned.user.restore(found.progress)
    if not ranks.alone:
        see_alike(store, ranks)
    return _Start(found, beginning, stored, preflight)


def _preflight(
    given: Arguments,
    planned: PlannedRun,
    store: LocalStore,
    found: Manifest | None,
    references: Mapping[str, Reference],
    ranks: Ranks,
) -> tuple[dict[str, Generations], Preflight]:
    """Return the files of every unit, and what the run will take, which fits and was confirmed.

    Collective: every rank must call this.
    """
    parts, drives = planned.parts, planned.drives
    with ranks.agreeing():
        if found is None:
            refuse_emptied(parts.captured)
            if given.source is None and given.init is None:
                refuse_partly_empty(parts.captured)
        stored = stored_units(parts, store, drives, references)
        allow_open_files(sum(files.open_files for files in stored.values()))
        if found is not None and ranks.alone and not found.shares:
            same_files(stored, store, found)
        preflight = preflight_of(parts, planned.plan, planned.budget, planned.dtype, store, stored)
        mine = [preflight.needed_bytes, *drives.needed(stored)]
    needed, *there = [sum(column) for column in zip(*ranks.everyone(mine), strict=True)]
    with ranks.agreeing():
        preflight = replace(preflight, needed_bytes=needed, drives=space_on(drives, needed, there))
        preflight.check()
        if given.confirm is not None and ranks.rank == 0:
            given.confirm(preflight)
    return stored, preflight


def _begin_fresh(
    given: Arguments, planned: PlannedRun, store: LocalStore, ranks: Ranks
) -> StartingState | None:
    """Create the directory, and return the state of ``source``, which optimizer and script take up.

    Collective: every rank must call this.
    """
    parts, user, prepared = planned.parts, planned.user, None
    with ranks.agreeing():
        if given.source is None:
            check_forms(parts)
        else:
            prepared = prepare(given.source, parts, user)
        user.now()  # whatever cannot be stored is refused now
    agree_on_held(ranks, parts)
    if prepared is not None:
        agree_on_source(ranks, prepared[0])
        prepared[0].check(ranks)
    with ranks.agreeing():
        if ranks.rank == 0:
            _enter_fresh(store)
    if prepared is None:
        return None
    take_up(*prepared, parts.captured, user)
    return prepared[0]


def _enter_fresh(store: LocalStore) -> None:
    """Create the directory and take its lock.

    Raises ``RunLocked`` if another process has begun a run there since.
    """
    store.enter()
    if store.commits():
        raise RunLocked(
            f"{store.root} got a run from another process a moment ago. Run again to continue that one."
        )


def _filled_runtime(
    given: Arguments, planned: PlannedRun, store: LocalStore, start: _Start, made: _Made
) -> Runtime:
    """Begin a timeline, and return the runtime with its files and memory, filled with the state of ``start``.

    Collective: every rank must call this.
    """
    data_parallel, parts = made.data_parallel, planned.parts
    if start.found is None and data_parallel.alone:
        made.names_before = store.names()
    made.caches = switch_off_cache(given.model)
    share_heaps()
    begin(store, data_parallel.control, start.found)
    data_parallel.control.first_does(lambda: store.take_drives(planned.drives.all))
    with data_parallel.control.agreeing():
        runtime = build(parts, planned.plan, store, start.stored, planned.device, data_parallel, given.seed)
        made.runtime = runtime
    fill(runtime, start.found, given.init, start.beginning)
    with data_parallel.control.agreeing():
        refuse_held(parts.captured)  # by code that ran since; from here on there is a commit
    return runtime


def _opened_engine(
    given: Arguments, planned: PlannedRun, runtime: Runtime, start: _Start, made: _Made
) -> Engine:
    """Return the engine, which has taken the model over, with the first commit of a fresh run.

    Collective: every rank must call this.
    """
    log = Path(given.place) / "events.jsonl"
    told = given.disk is None and made.data_parallel.rank == 0
    witness = Witness.of(given.place, made.data_parallel.rank) if given.disk is None else None
    with deferred():
        engine = made.engine = Engine(
            runtime, planned.plan, planned.rules, captured=planned.parts.captured, user=planned.user,
            preflight=start.preflight, events=given.events or EventLog(log if told else None),
            update_workers=given.io.update_workers, caches=made.caches, witness=witness,
        )  # fmt: skip
    if start.found is not None and told:
        engine.lost_steps_text = describe_lost_steps(log, start.found.step)
        if given.say is None:
            tell(f"{given.place} continues after step {start.found.step:,}. {engine.lost_steps_text}")
    if start.found is None and given.before_first_commit is not None:
        made.data_parallel.control.first_does(given.before_first_commit)
    engine.begin(start.found, start.beginning)
    with made.data_parallel.control.agreeing():
        engine.held.take_over()
    engine.guard()
    if made.data_parallel.rank == 0:
        say_opened(given.place, engine.steps_done)
    if witness is not None:
        witness.begun(engine.steps_done, {})
    return engine
