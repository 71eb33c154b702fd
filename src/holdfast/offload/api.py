"""``holdfast.offload``: from a model and an optimizer to an engine, in a fresh directory or one to resume.

Everything that can be wrong is found before anything is written. Then a fresh run gets its files and a first commit,
and a resumed run a new timeline that continues its newest whole commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..distributed import Ranks
from ..errors import BadInput, HoldfastError, RunLocked
from ..events import EventLog, said_lost, tell
from ..optim.mezo import MeZO
from ..optim.torch_threads import keep_torch_threads
from ..regular_files import home_path
from ..state.prepared_models import refuse_in_block, refuse_prepared
from ..state.progress import hyper_parameters
from ..store.commit.generations import Generations
from ..store.disk import AnyDisk
from ..store.format.manifest import Manifest
from ..store.path_checks import check_place
from ..store.run_store import LocalStore, begin, see_alike
from .data_parallel import DataParallelGroup, refuse_alone_only
from .engine import Engine
from .engine_progress import UserState
from .exit_hook import deferred
from .memory.device import open_device
from .model.model_parts import ModelParts
from .model.takeover import (
    refuse_emptied,
    refuse_held,
    refuse_open,
    refuse_partly_empty,
    switch_off_cache,
    switch_on_cache,
    take_over,
)
from .offload_options import IO, Clipping, Durability, Placement, Precision, require_whole
from .setup.automatic_placement import Planner, to_standard_error
from .setup.builder import build, fill, stored_units
from .setup.checks import (
    check_budget,
    check_choices,
    check_compiled,
    check_graphs,
    check_objects,
    check_recorded,
    check_renormalised,
    check_sample,
    check_source,
    check_stateful,
    check_together,
    check_zeroth,
    warn_of_resident,
    warn_of_slow_bf16,
)
from .setup.drive_setup import Drives
from .setup.engine_resume import newest_commit, progress_here, same_files
from .setup.equal_on_ranks import agree_on_choices, agree_on_placement, agree_on_source
from .setup.existing_state import agree_on_held, check_forms
from .setup.preflight import Preflight, preflight_of, space_on
from .setup.process_settings import on_host_by_default, share_heaps
from .setup.starting_state import Opens, StartingState, prepare, take_up
from .setup.step_planning import AUTO, ZEROTH, Budget, RunPlan, Wanted, make_plan
from .steps import StepRules


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
    precision: str | Precision = "bf16",
    budget: Budget | Literal["auto"] | None = None,
    placement: Placement = Placement(),  # noqa: B008 - frozen
    schedule: str = "vertical",
    order: str = "plain",
    clipping: float | Clipping | None = None,
    normalize: Literal["micro_batches", "tokens"] | Callable[[Any], float] = "micro_batches",
    sample: Any = None,
    micro_batches: int = 1,
    loss_fn: Callable[..., Any] | None = None,
    durability: Durability = Durability(),  # noqa: B008
    io: IO = IO(),  # noqa: B008
    deadline_seconds: float = 300.0,
    events: EventLog | None = None,
    confirm: Callable[[Preflight], None] | None = None,
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
            run, for example those of an encoder and of a decoder. By default the ``nn.ModuleList`` of one class with
            most bytes of parameters. A warning is given if that leaves more than half in memory and there is another
            list.
        device: Where blocks are computed: "cpu", "cuda", "cuda:1".
        precision: Dtype of the compute copy, or a ``Precision`` with the loss scale of fp16.
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
            tokens that are not -100 in ``"targets"`` or ``"labels"``; or a function from a micro-batch to its number. A
            model that shifts labels does not count the first label of each row; whether it does is found out once, by a
            forward pass of two micro-batches.
        sample: A micro-batch as ``step`` takes it (a tuple needs its ``loss_fn``); its values do not matter. With
            ``micro_batches``, the number per step, it lets memory be predicted before anything runs. ``"auto"``
            fractions and a ``budget`` need both.
        durability: How often the state is committed, and what is kept.
        io: Drives, limits of rates, threads.
        deadline_seconds: Longest time that a rank waits for another.
        events: Event log of the run; by default ``events.jsonl`` in its directory, none with ``EventLog(None)``.
        confirm: Called with the preflight before anything is written; it may raise.
        say: Called with the line that tells what was chosen; by default it is printed to standard error.
        disk: File system of the run in place of that of ``run``, for tests.

    The planner uses the machine's rates, which are measured in a few seconds where they are not known yet, and the
    times of the model's own block. Its choice and the resource that binds are an event ("plan") and a line for ``say``.
    With MeZO, and with several ranks, nothing is measured: what saves most traffic per byte stays first, as far as it
    fits, and only the line tells. With several ranks it is what fits on all, each in its part of its machine's memory.

    Skipped steps: a step with a loss that is not finite is skipped: nothing is updated, and the scheduler is stepped.
    So is a step whose norm is not finite, where a norm is taken. Clipping per block leaves out the blocks whose own
    norm is not finite (``last["left_out"]``).

    Several ranks: where torch.distributed is in use, training is data-parallel. Collective: every rank must call this.
    Each rank has its own micro-batches, as many as the others, and keeps, reads, updates and writes its shard of every
    block. Compute copies are gathered for each pass, and gradients are summed, first over a rank's micro-batches and
    then in the order of the ranks. All ranks need one directory, and see the loss over all micro-batches. A run can be
    continued with any number of ranks.

    Attributes: every value must go through a block's arguments and its return value. A tensor that modules pass on in
    an attribute is detected in the first step of one and of several micro-batches, and refused. Numbers and other
    objects in attributes, and tensors that a block keeps detached, are not detected: do not compute with them. Changes
    by way of ``.data`` or NumPy of tensors between blocks are not detected either.

    Raises ``BadInput`` and its subclasses (``ModelNotSupported``, ``OptimizerNotSupported``, ``DoesNotFit``,
    ``RunMismatch``, ``RunLocked``) with nothing written, ``Damaged`` if no commit of the run is whole, and
    ``RankFailed`` if another rank fails or does not come. With several ranks, an error after files were created (in
    ``init``, or of a full disk) leaves them behind without a commit: remove the directory.
    """
    place = home_path(run) if disk is None else run
    clipping, precision = Clipping.of(clipping), Precision.of(precision)
    fellows = DataParallelGroup.here(deadline_seconds)
    queue = store = runtime = engine = None
    before: set[str] | None = None
    caches: list[Any] = []
    try:
        with fellows.control.agreeing():
            schedule = _checked(
                model, optimizer, schedule, order, normalize, placement, clipping, precision, durability, io
            )
            require_whole("micro_batches", micro_batches, 1)
            check_stateful(scheduler, loader)
            check_budget(budget)
            check_source(source)
            refuse_alone_only(fellows, schedule)
            check_sample(sample)
            if disk is None:
                check_place(place)
            elif io.drives:
                raise BadInput(
                    "drives are directories of the file system, and disk= is another. Give one of them"
                )
        placed = Drives.of(place, io.drives, io.limits, say, fellows.control)
        with fellows.control.agreeing():
            refuse_open(model)
            parts = ModelParts.of(model, optimizer, precision.dtype, blocks, fellows.control)
            check_compiled(model, parts.blocks)
            for name, block in zip(parts.blocks.names, parts.blocks.modules, strict=True):
                refuse_in_block(name, block)
            rules = StepRules.of(schedule, order, clipping, precision, durability, normalize)
            refuse_held(parts.captured)
            settings = _settings(seed, order, clipping, precision, rules)
            given = hyper_parameters(optimizer.param_groups)
            user = UserState(
                parts.captured, optimizer, scheduler, loader, settings, given, fellows.world_size
            )
            target = open_device(device)
            check_graphs(target.torch_device, parts.blocks)
            if fellows.rank == 0:
                warn_of_slow_bf16(target.torch_device, precision.dtype, stacklevel=3)
                if blocks is None:
                    warn_of_resident(model, parts.blocks, stacklevel=3)
            bound = (AUTO if budget == "auto" else budget or Budget()).resolved(target, fellows.on_host)
            shape = rules.shape(micro_batches, durability.commit_every > 0)
            plan = make_plan(
                parts, target, schedule, shape, bound, sample, loss_fn,
                Wanted.of(placement, budget == "auto", by_rates=fellows.alone and schedule != ZEROTH),
                Planner(place, durability.commit_every, io.limits, say, placed.speed_up), io.update_workers,
            )  # fmt: skip
            rules = replace(
                rules, delayed_fraction=plan.delayed_fraction, recomputed_fraction=plan.recomputed_fraction
            )
        choices = {
            **settings, **asdict(placement), "retain": durability.retain, "source": source is not None,
            "drives": sorted(os.path.realpath(drive) for drive in io.drives),
        }  # fmt: skip
        agree_on_choices(fellows.control, parts, optimizer, rules, choices, given)
        plan = agree_on_placement(plan, schedule, shape, fellows.control)
        placed = placed.shared_out(plan, parts, fellows.control)
        with fellows.control.agreeing():
            if plan.filled and fellows.rank == 0:
                (say or to_standard_error)(f"plan: {plan.line}")
        keep_torch_threads()
        with deferred():  # no interrupt may come between the threads and the code that ends them
            queue = placed.queue(place, io.threads, io.limits)
        spare = 1 if durability.commit_every == 1 else 2
        store = LocalStore(
            place, retain=durability.retain, spare=spare, disk=disk, queue=queue, direct=io.direct
        )
        found = _found(store, parts, fellows.control)
        beginning, stored, preflight = _ready(
            store, parts, user, plan, bound, confirm, source, init, found, placed, fellows.control
        )
        before = store.names() if found is None and fellows.alone else None
        caches = switch_off_cache(model)
        share_heaps()
        begin(store, fellows.control, found)
        fellows.control.first_does(lambda: store.take_drives(placed.all))
        with fellows.control.agreeing():
            runtime = build(parts, plan, store, stored, target, fellows, seed)
        fill(runtime, found, init, beginning)
        with fellows.control.agreeing():
            refuse_held(parts.captured)  # by code that ran since; from here on there is a commit
        told = disk is None and fellows.rank == 0
        with deferred():
            engine = Engine(
                runtime, plan, rules, captured=parts.captured, user=user, preflight=preflight,
                events=events or EventLog(Path(place) / "events.jsonl" if told else None),
                update_workers=io.update_workers, caches=caches,
            )  # fmt: skip
        if found is not None and told:
            engine.said_lost = said_lost(Path(place) / "events.jsonl", found.step)
            if say is None:
                tell(f"{place} continues after step {found.step:,}. {engine.said_lost}")
        engine.begin(found, beginning)
        with fellows.control.agreeing():
            take_over(runtime, parts.captured, engine.taken)
        engine.guard()
        return engine
    except BaseException as error:
        fellows.close()  # so that ranks that wait for this one need not
        switch_on_cache(caches)
        if engine is not None:
            engine.give_up()
        if queue is not None:
            queue.close()  # nothing is under way any more when the lock is released
        if runtime is not None and engine is None:
            runtime.residency.release()
        refusal = isinstance(error, BadInput) or not isinstance(error, HoldfastError)
        try:
            if store is not None and before is not None and engine is None and refusal:
                with suppress(HoldfastError):  # its error would hide this one
                    store.withdraw(before)
        finally:
            if store is not None:
                store.close()
        raise


def _checked(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: str,
    order: str,
    normalize: Any,
    placement: Placement,
    clipping: Clipping,
    precision: Precision,
    durability: Durability,
    io: IO,
) -> str:
    """Raise ``BadInput`` for arguments that cannot be meant, and return the schedule, which MeZO replaces."""
    check_choices(schedule, order, normalize)
    check_objects(placement=placement, clipping=clipping, precision=precision, durability=durability, io=io)
    check_together(clipping, precision, schedule, durability)
    if isinstance(optimizer, MeZO):
        check_zeroth(optimizer.param_groups, schedule, order, placement, clipping, precision)
        schedule = ZEROTH
    refuse_prepared(model)
    check_recorded(model)
    check_renormalised(model)
    return schedule


def _settings(
    seed: int, order: str, clipping: Clipping, precision: Precision, rules: StepRules
) -> dict[str, Any]:
    """Return the options on which a run's numbers depend, as its commits hold them."""
    return {
        "seed": seed,
        "dtype": precision.dtype,
        "clip_norm": clipping.norm,
        "clipping": "per_block" if clipping.mode == "per_block" else "global",
        "normalize": rules.normalize_name,
        "order": order,
    }


def _ready(
    store: LocalStore,
    parts: ModelParts,
    user: UserState,
    plan: RunPlan,
    budget: Budget,
    confirm: Callable[[Preflight], None] | None,
    source: Opens | None,
    init: Callable[[nn.Module], Any] | None,
    found: Manifest | None,
    drives: Drives,
    ranks: Ranks,
) -> tuple[StartingState | None, dict[str, Generations], Preflight]:
    """Check everything, take the lock, and return what the runtime is filled from.

    Returns the state to begin from (None if a commit was ``found`` or there is no source), the files of every unit, and
    the preflight. A fresh directory is created only after all checks have passed. Collective: every rank must call
    this.
    """
    with ranks.agreeing():
        if found is None:
            refuse_emptied(parts.captured)
            if source is None and init is None:
                refuse_partly_empty(parts.captured)
        stored = stored_units(parts, store, drives)
        if found is not None and ranks.alone and not found.shares:
            same_files(stored, store, found)
        preflight = preflight_of(parts, plan, budget, store, stored)
        mine = [preflight.needed_bytes, *drives.needed(stored)]
    needed, *there = [sum(column) for column in zip(*ranks.everyone(mine), strict=True)]
    beginning, prepared = None, None
    with ranks.agreeing():
        preflight = replace(preflight, needed_bytes=needed, drives=space_on(drives, needed, there))
        preflight.check()
        if confirm is not None and ranks.rank == 0:
            confirm(preflight)
        if found is not None:
            user.restore(found.progress)
        else:
            if source is None:
                check_forms(parts)
            else:
                prepared = prepare(source, parts, user)
            user.now()  # whatever cannot be stored is refused now
    if found is None:
        agree_on_held(ranks, parts)
    if prepared is not None:
        agree_on_source(ranks, prepared[0])
        prepared[0].check(ranks)
    if found is None:
        with ranks.agreeing():
            if ranks.rank == 0:
                _enter_fresh(store)
        if prepared is not None:
            beginning = prepared[0]
            take_up(*prepared, parts.captured, user)
    if not ranks.alone:
        see_alike(store, ranks)
    return beginning, stored, preflight


def _found(store: LocalStore, parts: ModelParts, ranks: Ranks) -> Manifest | None:
    """Return the commit to continue, with the progress of this rank; None in a fresh directory.

    The first rank searches. Collective: every rank must call this.
    """

    def newest() -> Manifest | None:
        if not store.commits():
            return None
        store.enter()
        return newest_commit(store, parts.whole())

    with ranks.agreeing():
        found = ranks.first_takes_its_time(newest)  # every byte of the commit is read
    ref = ranks.everyone(None if found is None else found.ref)[0]
    if ref is None:
        return None
    with ranks.agreeing():
        return progress_here(found or store.load(ref), ranks)


def _enter_fresh(store: LocalStore) -> None:
    """Create the directory and take its lock.

    Raises ``RunLocked`` if another process has begun a run there since.
    """
    store.enter()
    if store.commits():
        raise RunLocked(
            f"{store.root} got a run from another process a moment ago. Run again to continue that one."
        )
