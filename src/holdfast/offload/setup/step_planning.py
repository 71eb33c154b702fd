"""The plan of a run: a measured micro-batch, the choice of what stays on the host, and a step's operations.

Memory, traffic and space are then computed from that list. Nothing is changed, written or allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from ...config import Fraction
from ...errors import BadInput, DoesNotFit, ModelNotSupported
from ...measure.free_memory import free_host_bytes
from ...profiles import MachineProfile
from ...quantities import MiB, parse_bytes
from ...schedule.horizontal import horizontal
from ...schedule.memory_use import Memory, predict
from ...schedule.mezo_schedule import zeroth
from ...schedule.operation_lists import EVALUATION_BATCHES
from ...schedule.operations import Op
from ...schedule.planner.placement import ORDER, STATE_FIRST, choose
from ...schedule.planner.placement_search import Question
from ...schedule.vertical import vertical
from ...schedule.work import FASTEST, MEMORY_SAVINGS, BlockPlacement, StepShape, Work
from ..memory.device import Device
from ..model.model_parts import ModelParts
from ..offload_options import Placement
from .automatic_placement import Planner, Prediction
from .block_measurement import MeasuredBlocks, measure
from .process_settings import process_bytes

SCHEDULES = {"vertical": vertical, "horizontal": horizontal}
ZEROTH = "zeroth"
"""The schedule of MeZO, which replaces the other two."""
LISTS = {**SCHEDULES, ZEROTH: zeroth}
NOT_GIVEN: dict[str, Fraction] = {
    "params": 0.0, "optimizer": 0.0, "activations": 1.0, "delayed": 0.0, "recomputed": 1.0,
}  # fmt: skip
"""Fractions used where none is given and nothing is planned."""
MOST_OF_FREE = 0.9
"""Fraction of the memory that is free when a run begins, which "auto" allows the run."""
KERNEL_BYTES = 48 * MiB
"""Bytes by which a process grows when torch's kernels run for the first time: code, tables and scratch.

Measured on x86-64 with torch 2.13.
"""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory that a run may take, in bytes or as text such as ``"20GiB"``.

    "auto" is nine tenths of what is free now. None is no limit.
    """

    device: float | str | None = None
    host: float | str | None = None

    def host_bytes(self) -> int | None:
        return _bytes(self.host)

    def device_bytes(self) -> int | None:
        return _bytes(self.device)

    def resolved(self, device: Device, on_host: int = 1) -> Budget:
        """Return the budget in bytes, with the memory that is free now.

        Each of the ``on_host`` ranks of this host gets an equal part.
        """
        free = free_host_bytes() / on_host
        host = process_bytes() + round(MOST_OF_FREE * free) if self.host == "auto" else self.host
        there: float | str | None = self.device
        if there == "auto":
            there = None if device.unified else round(MOST_OF_FREE * device.free_bytes())
        return Budget(device=there, host=host)


def _bytes(text: float | str | None) -> int | None:
    try:
        count = None if text is None else parse_bytes(int(text) if isinstance(text, float) else text)
        if count is not None and count < 0:
            raise ValueError(f"{text!r} is negative")
        return count
    except (ValueError, OverflowError, TypeError) as error:
        raise BadInput(f"budget: {error}") from error


AUTO = Budget(device="auto", host="auto")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run's step, before anything of it exists. Bytes."""

    work: Work
    placement: BlockPlacement
    operations: list[Op]
    """Operations of one step with the announced number of micro-batches."""
    held_bytes: int
    """Bytes that the process holds besides what the plan counts."""
    memory: Memory | None
    """The most memory that the run takes; None if it was not measured."""
    delayed_fraction: float = 0.0
    recomputed_fraction: float = 1.0
    evaluation_batches: int = EVALUATION_BATCHES
    """Micro-batches that an evaluation takes through the blocks together."""
    prediction: Prediction | None = None
    """The prediction by the machine's rates, if it was asked for."""
    filled: bool = False
    """True if something was chosen by what fits, without the machine's rates."""

    @property
    def line(self) -> str | None:
        """The choice as one line for a person; None where everything was given."""
        if self.prediction is not None:
            return self.prediction.line()
        return f"{self.placement.describe()}, by what fits" if self.filled else None

    def fits_device(self, budget: Budget) -> bool:
        """Return whether a separate device has the memory that the run takes, as far as both are known."""
        most = None if self.work.unified else budget.device_bytes()
        return most is None or self.memory is None or self.memory.device_bytes <= most

    @property
    def param_scratch_bytes(self) -> int:
        """Bytes of the SSD scratch for compute copies; 0 if none is read from there."""
        return sum(self.placement.scratch_bytes(self.work))

    @property
    def grad_scratch_bytes(self) -> int:
        """Bytes of the SSD scratch for gradients that wait; 0 if none do."""
        stores = any(op.key.kind == "store_grads" for op in self.operations)
        return sum(block.kept_grad_bytes for block in self.work.blocks) if stores else 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes on the SSD that are not part of commits; block inputs count if their size was measured."""
        inputs = sum(op.nbytes for op in self.operations if op.key.kind == "store_input")
        return self.param_scratch_bytes + self.grad_scratch_bytes + inputs

    @property
    def host_bytes(self) -> int | None:
        """Peak memory of the whole process."""
        return None if self.memory is None else self.held_bytes + self.memory.host_bytes

    @property
    def device_bytes(self) -> int | None:
        """Peak memory of a separate device."""
        return None if self.memory is None or self.work.unified else self.memory.device_bytes


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The fractions that were asked for."""

    on_host: dict[str, Fraction]
    """Fractions of params, optimizer and activations."""
    delayed_fraction: Fraction
    recomputed_fraction: Fraction
    planned: bool
    """True if a fraction is "auto" and chosen by the machine's rates."""

    @classmethod
    def of(cls, placement: Placement, everything: bool, by_rates: bool) -> Wanted:
        """Return the fractions, with defaults for those that are None.

        With ``everything``, they are chosen ("auto"); otherwise they are as in ``NOT_GIVEN``.
        """
        otherwise: dict[str, Fraction] = dict.fromkeys(NOT_GIVEN, "auto") if everything else NOT_GIVEN
        given = dict(otherwise)
        fractions = placement.fractions.items()
        given |= {name.partition("_")[0]: value for name, value in fractions if value is not None}
        chosen = everything or "auto" in given.values()
        return cls(
            delayed_fraction=given.pop("delayed"), recomputed_fraction=given.pop("recomputed"), on_host=given,
            planned=chosen and by_rates,
        )  # fmt: skip

    def usual(self, shape: StepShape) -> StepShape:
        """Return ``shape`` with the fractions of a step where none of those to be chosen is known yet."""
        delayed, recomputed = self.delayed_fraction, self.recomputed_fraction
        return replace(
            shape,
            delayed_fraction=0.0 if delayed == "auto" else delayed,
            recomputed_fraction=1.0 if recomputed == "auto" else recomputed,
        )


def make_plan(
    parts: ModelParts,
    device: Device,
    schedule: str,
    shape: StepShape,
    budget: Budget,
    sample: Any,
    loss_fn: Callable[..., Any] | None,
    wanted: Wanted,
    planner: Planner,
    update_workers: int,
    room: float | None,
) -> RunPlan:
    """Choose what stays on the host within the budget, by the ``planner``'s rates if ``wanted`` asks for it.

    Without a budget, gradients that wait may take half of ``room``, the bytes that are free now. Raises ``BadInput``,
    and ``DoesNotFit`` naming a budget that works.
    """
    measured = _measured(parts, device, budget, wanted.on_host, sample, loss_fn)
    host_budget = None if measured is None else budget.host_bytes()  # the needs are known in part only
    work = parts.work(
        measured, device.unified, update_workers=update_workers, guesses=shape.clipping == "speculate"
    )
    lists = LISTS[schedule]
    usual = wanted.usual(shape)
    fit = partial(
        choose, work, usual, host_budget, schedule=lists, device_budget_bytes=budget.device_bytes(),
        order=STATE_FIRST if schedule == ZEROTH else ORDER, waiting_bytes=inf if room is None else room / 2,
        **wanted.on_host,
    )  # fmt: skip

    device_budget = None if device.unified or measured is None else budget.device_bytes()

    def together(held: int) -> int:
        return _together(
            partial(fit, held_bytes=held),
            lambda placement, count: predict(work, placement, usual, lists, count).device_bytes,
            host_budget, device_budget,
        )  # fmt: skip

    def ask(machine: MachineProfile, timed: Work) -> Question:
        held = process_bytes() + KERNEL_BYTES  # timing the model leaves some
        return Question(
            work=timed, shape=shape, machine=machine, schedule=lists, host_budget=host_budget, held_bytes=held,
            evaluation_batches=together(held), asked=wanted.on_host,
            delayed_fraction=wanted.delayed_fraction, recomputed_fraction=wanted.recomputed_fraction,
            device_budget=budget.device_bytes(),
        )  # fmt: skip

    prediction = None
    if wanted.planned and measured is not None:
        prediction = planner.predict(ask, work, parts, device, sample, loss_fn)
        held, at_once = prediction.question.held_bytes, prediction.question.evaluation_batches
        placement, usual = prediction.choice.placement, prediction.shape
    else:
        held = process_bytes() + KERNEL_BYTES
        at_once = together(held)
        placement = fit(evaluation_batches=at_once, held_bytes=held)
    delayed, recomputed = usual.delayed_fraction, usual.recomputed_fraction
    shape = replace(shape, delayed_fraction=delayed, recomputed_fraction=recomputed)
    return RunPlan(
        work=work, placement=placement, operations=lists(work, placement, shape), held_bytes=held,
        memory=None if measured is None else predict(work, placement, shape, lists, at_once),
        delayed_fraction=delayed, recomputed_fraction=recomputed, evaluation_batches=at_once,
        prediction=prediction,
        filled=prediction is None and measured is not None and "auto" in wanted.on_host.values(),
    )  # fmt: skip


def _together(
    fit: Callable[..., BlockPlacement],
    device_bytes: Callable[[BlockPlacement, int], int],
    host_budget: int | None,
    device_budget: int | None,
) -> int:
    """Return how many micro-batches an evaluation may take through the blocks together.

    There are fewer than usual if the run would not ``fit`` otherwise, or take more than the budget of a separate device
    by ``device_bytes``. Slower evaluations are preferred to slower steps.
    """
    if host_budget is None and device_budget is None:
        return EVALUATION_BATCHES
    for savings in ((FASTEST,), MEMORY_SAVINGS):
        count = EVALUATION_BATCHES
        while count:
            with suppress(DoesNotFit):
                placement = fit(evaluation_batches=count, savings=savings)
                if device_budget is None or device_bytes(placement, count) <= device_budget:
                    return count
            count //= 2
    return 1


def _refuse_unmeasured(budget: Budget, device: Device, on_host: dict[str, Fraction]) -> None:
    """Raise ``BadInput`` if a budget needs a sample: without it block inputs and activations would count as nothing."""
    host, on_device = budget.host_bytes(), budget.device_bytes()
    asked = [f"{kind}_on_host={share!r}" for kind, share in on_host.items() if share == "auto"]
    asked += [f"a budget of {host} bytes of host memory"] if host is not None else []
    asked += [f"a budget of {on_device} bytes on the device"] if on_device and not device.unified else []
    if asked:
        raise BadInput(
            f"{asked[0]} cannot be kept to without knowing what a micro-batch takes: pass sample=, a micro-batch as "
            "engine.step takes it (its values do not matter), and micro_batches=, how many make a step."
        )


def _refuse_auto(on_host: dict[str, Fraction]) -> None:
    for kind, share in on_host.items():
        if share == "auto":
            raise BadInput(
                f"{kind}_on_host='auto' cannot be chosen within a budget, since the model could not be measured. "
                "Pass a fraction, such as 0.0."
            )


def _measured(
    parts: ModelParts,
    device: Device,
    budget: Budget,
    on_host: dict[str, Fraction],
    sample: Any,
    loss_fn: Callable[..., Any] | None,
) -> MeasuredBlocks | None:
    """Return the cost of a micro-batch; None without a ``sample``, or, with a warning, if the model cannot be traced.

    Raises ``BadInput`` if what was asked for needs the cost.
    """
    if sample is None:
        _refuse_unmeasured(budget, device, on_host)
        return None
    try:
        return measure(
            parts.model, parts.blocks, sample, parts.resident.dtype, loss_fn, parts.optimizer.takes_gradients
        )
    except ModelNotSupported as error:
        warnings.warn(f"memory is not predicted and no budget is checked: {error}", stacklevel=8)
    if budget.host_bytes() is not None:
        _refuse_auto(on_host)
    return None
