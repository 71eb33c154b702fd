"""The planner's answer for the machine, the model and the micro-batches at hand. Seconds, bytes.

The machine's rates come from its profile (``machine_probe``), within the limits that the run was given. The times of
the model's block and head are measured each time (``time_model``). The choice changes a run's speed, never its numbers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...errors import ModelNotSupported
from ...events import tell
from ...measure.drive_rates import Limits, nearest
from ...measure.machine_probe import BlockTimes, CachedProfile, machine_at, precision_of
from ...profiles import MachineProfile
from ...quantities import format_seconds
from ...schedule.planner.machine_rates import RESOURCE_NAMES
from ...schedule.planner.placement_search import Choice, Question, answer, play
from ...schedule.work import StepShape, Work
from ..memory.device import Device
from ..model.model_parts import ModelParts
from .model_timing import MicroBatchTimes, time_model
from .process_settings import give_back_freed


@dataclass(frozen=True)
class Prediction:
    """The planner's choice, and the step time that it predicts."""

    question: Question
    """The machine as it was found, and the model with its times."""
    choice: Choice
    shape: StepShape
    """The shape of the usual step, for which ``choice`` was made."""
    stated: tuple[str, ...]
    """Names of the values that were given instead of chosen."""
    tried: int
    by_linear_program: bool
    known: CachedProfile
    times: MicroBatchTimes | None
    """None where the model could not be timed; its floating-point operations are used instead."""
    ssd_adjusted: bool
    """True if the SSD's rates are not the profile's (limited, or several SSDs), so the profile learns nothing from
    it."""

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Busy time in seconds of each resource that serves lanes."""
        machine = self.choice.simulation.machine
        return machine.by_server(self.choice.busy_seconds)

    @property
    def busiest(self) -> tuple[str, float]:
        """The busiest resource, and the fraction of a step's time during which it is busy."""
        return self.busiest_seconds[0], self.choice.simulation.speed_of_light

    @property
    def busiest_seconds(self) -> tuple[str, float]:
        """The busiest resource, and the seconds that it works for a step: no step with these operations takes less."""
        return self.choice.simulation.busiest()

    def line(self) -> str:
        """Return the choice and the predicted step time as one line for a person."""
        name, part = self.busiest
        shape = self.shape
        turned = f", {shape.delayed_fraction:.0%} of updates delayed" if shape.delayed_fraction else ""
        if shape.recomputed_fraction < 1:
            turned += f", {shape.recomputed_fraction:.0%} of blocks computed again in the backward pass"
        seconds = self.choice.step_seconds
        time = f"{seconds * 1e3:.0f} ms" if seconds < 1 else format_seconds(seconds)
        busy = f"{RESOURCE_NAMES.get(name, name)} busy {part:.0%} of it"
        return f"{self.choice.placement.describe()}{turned}; about {time} a step, {busy}"

    def event(self) -> dict[str, Any]:
        """Return the fields of the "plan" event."""
        choice, times = self.choice, self.times
        return {
            "on_host": choice.fractions,
            "delayed_fraction": self.shape.delayed_fraction,
            "recomputed_fraction": self.shape.recomputed_fraction,
            "stated": list(self.stated),
            "micro_batches": self.shape.micro_batches,
            "order": self.shape.order,
            "step_seconds": choice.step_seconds,
            "busy_seconds": choice.busy_seconds,
            "busiest": self.busiest[0],
            "busiest_part": self.busiest[1],
            "tried": self.tried,
            "by": "linear program" if self.by_linear_program else "traffic saved per byte",
            "machine": self.known.name,
            "measured_now": self.known.measured_now,
            "times": times and [times.forward_seconds, times.backward_seconds, times.head_seconds],
        }


@dataclass(frozen=True)
class Planner:
    """Chooses a placement and predicts the step time; called once, when an engine is built."""

    directory: str | Path
    commit_every: int
    limits: Limits
    say: Callable[[str], object] | None
    speed_up: float = 1.0
    """Rate of all drives of the run together, divided by that of its own drive."""

    def predict(
        self,
        ask: Callable[[MachineProfile, Work], Question],
        work: Work,
        parts: ModelParts,
        device: Device,
        sample: Any,
        loss_fn: Callable[..., Any] | None,
    ) -> Prediction:
        """Return the best choice with its prediction, or the prediction alone where there is only one choice.

        ``ask`` makes the question from a machine and from work whose times are known. Raises ``DoesNotFit``.
        """
        say = self.say or tell
        times, dtype = _times_or_none(parts, device, sample, loss_fn), parts.resident.dtype
        known = machine_at(
            nearest(Path(self.directory)),
            device.torch_device,
            lambda seconds: _profile_times(times, work, device.torch_device, dtype),
            say,
            0 if has_commits(Path(self.directory)) else least_bytes(work),
        )
        machine = sped_up(within(known.profile, self.limits), self.speed_up)
        if times is None:  # else the profile's rate cancels out
            machine = in_dtype(machine, device.torch_device, dtype)
        question = ask(machine, work if times is None else with_times(work, times, machine))
        found = answer(question)
        choice, shape = found.best, found.best.shape
        if self.commit_every > 1:  # what is predicted is the usual step
            shape = replace(shape, commit=False)
            choice = play(question, choice.placement, shape)
        turned = {"delayed": question.delayed_fraction, "recomputed": question.recomputed_fraction}
        stated = [*question.stated, *(name for name, value in turned.items() if value != "auto")]
        adjusted = self.speed_up != 1.0 or any(limit is not None for limit in self.limits)
        prediction = Prediction(
            question,
            choice,
            shape,
            tuple(stated),
            found.tried,
            found.by_linear_program,
            known,
            times,
            adjusted,
        )
        say(f"plan: {prediction.line()}")
        if not found.by_linear_program and len(stated) < 5:
            say(
                "without highspy (pip install 'holdfast[plan]') placement is by what saves most traffic per byte"
            )
        return prediction


def has_commits(run: Path) -> bool:
    """Return whether ``run`` holds commits, so that its state takes no further space."""
    return (run / "commits").is_dir()


def least_bytes(work: Work) -> int:
    """Return the least bytes that the state takes on disk: two generations of everything."""
    return 2 * (sum(block.state_bytes for block in work.blocks) + work.resident_state_bytes)


def with_times(work: Work, times: MicroBatchTimes, machine: MachineProfile) -> Work:
    """Return ``work`` with the floating-point operations that ``machine`` does in the measured ``times``.

    Only the first repeated block was timed; other blocks get times in proportion to their floating-point operations.
    """
    rate = machine.device_flop_per_second
    first = _first_flop(work)
    blocks = tuple(
        replace(
            block,
            forward_flop=times.forward_seconds * rate * (block.forward_flop / first if first else 1.0),
            backward_flop=times.backward_seconds * rate * (block.forward_flop / first if first else 1.0),
        )
        for block in work.blocks
    )
    return replace(work, blocks=blocks, head_flop=times.head_seconds * rate)


def _first_flop(work: Work) -> float:
    """Return the floating-point operations of the first block that has any; an embedding has none."""
    return next((block.forward_flop for block in work.blocks if block.forward_flop), 0.0)


def within(machine: MachineProfile, limits: Limits) -> MachineProfile:
    """Return ``machine`` with its SSD no faster than ``limits``."""
    read, write, both = (limit or sys.maxsize for limit in limits)
    read, write = min(read, both), min(write, both)
    mixed = machine.ssd_mixed_bytes_per_second
    return replace(
        machine,
        ssd_read_bytes_per_second=min(machine.ssd_read_bytes_per_second, int(read)),
        ssd_write_bytes_per_second=min(machine.ssd_write_bytes_per_second, int(write)),
        ssd_mixed_bytes_per_second=mixed and min(mixed, int(both), 2 * int(min(read, write))),
    )


def sped_up(machine: MachineProfile, factor: float) -> MachineProfile:
    """Return ``machine`` with the rates of its SSD multiplied by ``factor``."""
    mixed = machine.ssd_mixed_bytes_per_second
    return replace(
        machine,
        ssd_read_bytes_per_second=int(machine.ssd_read_bytes_per_second * factor),
        ssd_write_bytes_per_second=int(machine.ssd_write_bytes_per_second * factor),
        ssd_mixed_bytes_per_second=mixed and int(mixed * factor),
    )


def in_dtype(machine: MachineProfile, device: torch.device, dtype: torch.dtype) -> MachineProfile:
    """Return ``machine`` with the rate of its device in ``dtype``, measured now if the known one is of another."""
    if machine.precision == precision_of(dtype):
        return machine
    found = _of_a_product(device, dtype)
    return replace(machine, device_flop_per_second=found.flop_per_second, precision=found.precision)


def _times_or_none(
    parts: ModelParts, device: Device, sample: Any, loss_fn: Callable[..., Any] | None
) -> MicroBatchTimes | None:
    """Return the measured times; None, with a warning, where the model cannot be timed."""
    try:
        times = time_model(parts.model, parts.blocks.repeated, sample, parts.resident.dtype, device, loss_fn)
        give_back_freed()
        return times
    except ModelNotSupported as error:
        warnings.warn(f"steps are predicted by their floating-point operations: {error}", stacklevel=9)
        return None


def _profile_times(
    times: MicroBatchTimes | None, work: Work, device: torch.device, dtype: torch.dtype
) -> BlockTimes:
    """Return a block's times for the machine's profile; without ``times``, those of a matrix product."""
    forward = _first_flop(work)
    if times is None:
        return _of_a_product(device, dtype)
    seconds = times.forward_seconds + times.backward_seconds
    return BlockTimes(
        times.forward_seconds,
        times.backward_seconds,
        4 * max(forward, 1.0) / seconds,
        "a block of a run's model",
        precision_of(dtype),
    )


def _of_a_product(device: torch.device, dtype: torch.dtype) -> BlockTimes:
    """Time a matrix product, for a block of which only the floating-point operations are known."""
    size = 1024
    one = torch.ones(size, size, dtype=dtype, device=device)
    float((one @ one)[0, 0])
    start = perf_counter()
    float((one @ one)[0, 0])
    seconds = perf_counter() - start
    return BlockTimes(seconds, 3 * seconds, 2 * size**3 / seconds, "a matrix product", precision_of(dtype))
