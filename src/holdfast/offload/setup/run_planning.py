"""The plan of a run: what was passed to ``offload``, checked, and what this model and machine make of it.

Nothing is written, and nothing of the model is changed. Called by ``offload``, on all ranks at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...distributed import Ranks
from ...errors import BadInput, DoesNotFit
from ...events import EventLog, tell
from ...measure.free_memory import free_host_bytes
from ...measure.hardware_rates import fast_dtype
from ...optim.mezo import MeZO
from ...schedule.work import StepShape
from ...state.capture import CapturedParameter
from ...state.prepared_models import refuse_in_block, refuse_prepared
from ...state.progress import hyper_parameters, refuse_stateless
from ...store.disk import AnyDisk
from ...store.path_checks import check_place, refuse_foreign_checkpoint
from ..data_parallel import DataParallelGroup, refuse_alone_only
from ..engine_progress import UserState
from ..loss_scaling import rules_of
from ..memory.device import Device, open_device
from ..model.blocks import can_stream
from ..model.model_parts import ModelParts, ties_streamed
from ..model.quantised_layers import compute_dtypes, open_layers
from ..model.takeover import refuse_held, refuse_open
from ..offload_options import IO, Clipping, Durability, Placement, Precision, StepRules, require_integer
from ..recomputation import can_measure
from .automatic_placement import Planner
from .checks import (
    check_budget,
    check_choices,
    check_compiled,
    check_graphs,
    check_objects,
    check_recorded,
    check_renormalised,
    check_sample,
    check_skipped,
    check_source,
    check_together,
    check_zeroth,
    warn_of_resident,
    warn_of_slow_bf16,
)
from .drive_setup import Drives
from .engine_resume import RunContents, contents_of, dtype_of_run
from .equal_on_ranks import agree_on_choices, agree_on_placement
from .preflight import Preflight
from .starting_state import Opens
from .step_planning import AUTO, MOST_OF_FREE, ZEROTH, Budget, RunPlan, Wanted, make_plan


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of one call of ``offload``, which explains them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    place: str | Path
    """The directory of the run."""
    scheduler: Any
    loader: Any
    source: Opens | None
    init: Callable[[nn.Module], Any] | None
    seed: int
    blocks: Sequence[nn.Module] | nn.ModuleList | None
    device: str
    precision: Precision
    budget: Budget | Literal["auto"] | None
    placement: Placement
    schedule: str
    order: str
    clipping: Clipping
    normalize: Literal["micro_batches", "tokens", "sum"] | Callable[[Any], float]
    sample: Any
    micro_batches: int
    loss_fn: Callable[..., Any] | None
    durability: Durability
    io: IO
    events: EventLog | None
    confirm: Callable[[Preflight], None] | None
    before_first_commit: Callable[[], object] | None
    say: Callable[[str], object] | None
    disk: AnyDisk | None


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that is planned, with nothing written yet."""

    parts: ModelParts
    rules: StepRules
    user: UserState
    device: Device
    budget: Budget
    """The memory that the run may take, in bytes."""
    dtype: str
    """The dtype of the compute copies: the one that was given, or that of the run, or the fast one."""
    plan: RunPlan
    drives: Drives


def checked_arguments(given: Arguments, data_parallel: DataParallelGroup) -> Arguments:
    """Return ``given``, with the schedule of MeZO where that is the optimizer.

    Raises ``BadInput`` for arguments that cannot be meant. Collective: every rank must call this.
    """
    clipping, precision, durability, io = given.clipping, given.precision, given.durability, given.io
    with data_parallel.control.agreeing():
        check_choices(given.schedule, given.order, given.normalize)
        check_objects(
            placement=given.placement, clipping=clipping, precision=precision, durability=durability, io=io
        )
        check_together(clipping, precision, given.schedule, durability)
        if isinstance(given.optimizer, MeZO):
            groups = given.optimizer.param_groups
            check_zeroth(groups, given.schedule, given.order, given.placement, clipping, precision)
            given = replace(given, schedule=ZEROTH)
        refuse_open(given.model)
        open_layers(given.model)
        refuse_prepared(given.model)
        check_renormalised(given.model)
        require_integer("micro_batches", given.micro_batches, 1)
        refuse_stateless({"scheduler": given.scheduler, "loader": given.loader})
        check_budget(given.budget)
        check_source(given.source)
        refuse_alone_only(data_parallel, given.schedule, given.placement.expert_slots)
        check_sample(given.sample)
        if given.disk is None:
            check_place(given.place)
            refuse_foreign_checkpoint(given.place)
        elif io.drives:
            raise BadInput(
                "drives are directories of the file system, and disk= is another. Give one of them"
            )
    return given


def plan_run(given: Arguments, drives: Drives, data_parallel: DataParallelGroup) -> PlannedRun:
    """Examine the model and plan the run on this rank. Collective: every rank must call this."""
    durability, io = given.durability, given.io
    with data_parallel.control.agreeing():
        device = open_device(given.device)
    dtype = _chosen_dtype(given, device, data_parallel.control)
    with data_parallel.control.agreeing():
        given = replace(given, precision=replace(given.precision, dtype=dtype))
        check_together(given.clipping, given.precision, given.schedule, durability)
        rules = StepRules.of(
            given.schedule, given.order, given.clipping, given.precision, durability, given.normalize
        )
        run = contents_of(given.place, given.disk)
        ways = _ways(given, run, data_parallel.alone)
        if ways[0]:
            _refuse_other_numbers(given)
        parts = _examined(given, data_parallel.control, run, ways[0])
        user = UserState(
            parts.captured, given.optimizer, given.scheduler, given.loader, _settings(given, rules),
            hyper_parameters(given.optimizer.param_groups), data_parallel.world_size,
        )  # fmt: skip
        check_graphs(device.torch_device, parts.blocks)
        if data_parallel.rank == 0:
            warn_of_slow_bf16(device.torch_device, given.precision.dtype)
            if given.blocks is None:
                warn_of_resident(given.model, parts.blocks)
        budget = AUTO if given.budget == "auto" else given.budget or Budget()
        budget = budget.resolved(device, data_parallel.on_host)
        room = None if budget.host is not None else MOST_OF_FREE * free_host_bytes() / data_parallel.on_host

        def planned(rules: StepRules) -> RunPlan:
            return make_plan(
                parts, device, given.schedule, _usual_shape(given, rules), budget, given.sample, given.loss_fn,
                Wanted.of(given.placement, given.budget == "auto", by_rates=_knows_reads(given, data_parallel)),
                Planner(given.place, durability.commit_every, io.limits, given.say, drives.speed_up),
                io.update_workers, room,
            )  # fmt: skip

        may_stream = len(ways) > 1 and can_stream(given.model, parts.blocks, ties_streamed(given.optimizer))
        try:
            rules, plan = _within_budget(rules, planned, room)
            if may_stream and not plan.fits_device(budget):
                raise DoesNotFit("embedding and head do not fit on the device beside a block")
        except DoesNotFit:
            if not may_stream:
                raise
            parts = _examined(given, data_parallel.control, run, True)
            rules, plan = _within_budget(rules, planned, room)
    modes = data_parallel.control.everyone(rules.clipping)
    with data_parallel.control.agreeing():
        if rules.chooses and "defer" in modes:  # another rank has no memory for a guess
            rules = replace(rules, clipping="defer")
            plan = planned(rules)
    rules = replace(
        rules, delayed_fraction=plan.delayed_fraction, recomputed_fraction=plan.recomputed_fraction,
        chooses_recomputed=_leaves_all_open(given) and len(parts.units) > 1 and can_measure(),
    )  # fmt: skip
    return PlannedRun(
        parts=parts,
        rules=rules,
        user=user,
        device=device,
        budget=budget,
        dtype=dtype,
        plan=plan,
        drives=drives,
    )


def _chosen_dtype(given: Arguments, device: Device, ranks: Ranks) -> str:
    """Return the compute dtype: the one that was given, or for "auto" that of the run, or else the fast one.

    "auto" is what rank 0 finds, since two measurements may differ. Collective: every rank must call this.
    """
    asked = given.precision.dtype

    def chosen() -> str:
        if asked != "auto":
            return asked
        if (kept := dtype_of_run(given.place, given.disk)) is not None:
            return kept
        fast = fast_dtype(device.torch_device)
        if fast == "fp32":
            (given.say or tell)(
                'precision: fp32, in which this processor is faster than in bf16 (precision="bf16" takes less memory)'
            )
        return fast

    first = ranks.first_does(chosen)
    return first if asked == "auto" else asked


def keeps_dtype(given: Arguments, planned: PlannedRun, ranks: Ranks) -> bool:
    """Return whether ``planned`` has the dtype that this call must use.

    False if the dtype was "auto" and another process has begun the run, in another dtype, since it was planned.
    Collective: every rank must call this.
    """
    return ranks.first_does(
        lambda: (
            given.precision.dtype != "auto" or dtype_of_run(given.place, given.disk) in (None, planned.dtype)
        )
    )


def _ways(given: Arguments, run: RunContents | None, alone: bool) -> tuple[bool, ...]:
    """Return whether embedding and head are to be streamed; both answers, the better first, where that is open.

    ``run`` is resumed. Several ranks have no choice, since it would have to be the same on all.
    """
    stated = given.placement.embedding_and_head
    if stated is not None:
        return (stated == "streamed",)
    if run is not None:
        return (run.streams_all,)
    limited = given.budget is not None and given.sample is not None
    return (False, True) if alone and limited and _other_numbers(given) is None else (False,)


def _other_numbers(given: Arguments) -> str | None:
    """Return why streaming embedding and head would change the numbers of this run; None if it would not."""
    if given.clipping.mode == "per_block":
        return "clipping per_block clips all that lies outside of blocks together"
    if given.order == "snake":
        return "the order snake sums gradients by the number of a block, and units before the blocks count"
    return None


def _refuse_other_numbers(given: Arguments) -> None:
    if (why := _other_numbers(given)) is not None:
        raise BadInput(
            f'{why}, so a streamed embedding and head would change the numbers: give embedding_and_head="resident", or'
            " another clipping or order"
        )


def _within_budget(
    rules: StepRules, planned: Callable[[StepRules], RunPlan], room: float | None
) -> tuple[StepRules, RunPlan]:
    """Return the plan of ``rules``, or of rules that wait for the norm where a choice does not fit.

    Without a budget a choice has to fit into ``room``, the bytes that are free now. A choice for which nothing may be
    read ahead would be slower than waiting.
    """
    try:
        plan = planned(rules)
        fits = room is None or plan.memory is None or plan.memory.host_bytes <= room
        if not rules.chooses or (fits and plan.placement.saving.loads_ahead):
            return rules, plan
    except DoesNotFit:
        if not rules.chooses:
            raise
    rules = replace(rules, clipping="defer")
    return rules, planned(rules)


def agreed_run(given: Arguments, mine: PlannedRun, data_parallel: DataParallelGroup) -> PlannedRun:
    """Return what this rank has planned, with a placement that fits on all ranks, and its share of the drives.

    Raises ``BadInput`` on all ranks unless all were given the same. Collective: every rank must call this.
    """
    ranks, parts, rules = data_parallel.control, mine.parts, mine.rules
    choices = {
        **mine.user.settings, **asdict(given.placement), "retain": given.durability.retain,
        "source": given.source is not None,
        "drives": sorted(os.path.realpath(drive) for drive in given.io.drives),
    }  # fmt: skip
    agree_on_choices(ranks, parts, given.optimizer, rules, choices, mine.user.given)
    plan = agree_on_placement(mine.plan, given.schedule, _usual_shape(given, rules), ranks)
    drives = mine.drives.shared_out(plan, parts, ranks)
    with ranks.agreeing():
        if plan.filled and ranks.rank == 0:
            (given.say or tell)(f"plan: {plan.line}")
    return replace(mine, plan=plan, drives=drives)


def _knows_reads(given: Arguments, data_parallel: DataParallelGroup) -> bool:
    """Return whether this process plans alone and knows the reads of a step: those of experts depend on the text."""
    return data_parallel.alone and given.schedule != ZEROTH and given.placement.expert_slots is None


def _leaves_all_open(given: Arguments) -> bool:
    """Return whether nothing was given that says how much memory a run of training steps may take."""
    stated = [given.budget, given.sample, *given.placement.fractions.values()]
    return stated.count(None) == len(stated) and given.schedule != ZEROTH


def _examined(given: Arguments, ranks: Ranks, run: RunContents | None, streams_all: bool) -> ModelParts:
    """Return the parts of the model, of which ``run`` is resumed.

    Raises ``BadInput`` for a model that cannot be trained out of core.
    """
    parts = ModelParts.of(
        given.model,
        given.optimizer,
        given.precision.dtype,
        given.blocks,
        ranks,
        _stored_dtypes(given, run),
        streams_all,
        given.placement.expert_slots,
    )
    check_compiled(given.model, parts.blocks)
    check_recorded(given.model, parts.blocks)
    check_skipped(given.model, parts.blocks)
    for name, block in zip(parts.blocks.names, parts.blocks.modules, strict=True):
        refuse_in_block(name, block)
    refuse_held(parts.captured)
    return parts


def _stored_dtypes(
    given: Arguments, run: RunContents | None
) -> Callable[[CapturedParameter], torch.dtype | None]:
    """Return a function that tells in which dtype a parameter on ``meta`` is stored: in the run, else in the source."""
    if run is not None:
        return lambda parameter: run.dtypes.get(parameter.name)
    # the weights of a folder know theirs; other sources do not say
    known = getattr(given.source, "dtypes", dict)()
    return lambda parameter: known.get(id(parameter.parameter))


def _settings(given: Arguments, rules: StepRules) -> dict[str, Any]:
    """Return the options on which a run's numbers depend, as its commits hold them."""
    return {
        "seed": given.seed,
        "dtype": given.precision.dtype,
        "clip_norm": given.clipping.norm,
        "clipping": "per_block" if given.clipping.mode == "per_block" else "global",
        "normalize": rules.normalize_name,
        "order": given.order,
        **({} if rules.loss_scale is None else {"loss_scale_rules": rules_of(rules.loss_scale)}),
        **({"quantised_compute_dtype": dtypes} if (dtypes := compute_dtypes(given.model)) else {}),
    }


def _usual_shape(given: Arguments, rules: StepRules) -> StepShape:
    """Return the shape of a step of as many micro-batches as were announced."""
    return rules.shape(given.micro_batches, given.durability.commit_every > 0)
