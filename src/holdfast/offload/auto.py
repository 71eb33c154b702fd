"""Auto: what the planner says for the machine, the model and the micro-batches at hand. Seconds, bytes.

The machine's rates are its profile's (``probe/cached.py``), within the limits that the run was given; the times of the
model's block and head are measured each time (``times.py``). What is chosen changes a run's speed, never its numbers.
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

from ..errors import ModelNotSupported
from ..plan.auto import Choice, Question, answer, play
from ..plan.work import StepShape, Work
from ..probe.cached import Known, machine_at
from ..probe.machine import BlockTimes
from ..profiles import MachineProfile
from ..units import format_seconds
from .device import Device
from .parts import Parts
from .process import give_back_freed
from .times import Times, time_model

Limits = tuple[int | None, int | None, int | None]
"""Bytes per second: of reads, of writes, of both together."""


@dataclass(frozen=True)
class Prediction:
    """What was chosen, and what a step is to take."""

    question: Question
    """Of the machine as it was found, and of the model with its times."""
    choice: Choice
    shape: StepShape
    """Of the usual step, to which ``choice`` belongs."""
    stated: tuple[str, ...]
    """What was not chosen but given."""
    tried: int
    by_linear_program: bool
    known: Known
    times: Times | None
    """None where the model could not be timed: by its floating-point operations, then."""
    ssd_adjusted: bool
    """Planned with an SSD that is not the profile's, limited or several, which so learns nothing from it."""

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Of what serves the lanes."""
        machine = self.choice.simulation.machine
        return machine.by_server(self.choice.busy_seconds)

    @property
    def busiest(self) -> tuple[str, float]:
        """Which, and its part of a step's time."""
        name, seconds = max(self.busy_seconds.items(), key=lambda item: item[1])
        return name, min(seconds / self.choice.step_seconds, 1.0)

    def line(self) -> str:
        """For a person."""
        name, part = self.busiest
        shape = self.shape
        turned = f", {shape.delayed_fraction:.0%} of updates delayed" if shape.delayed_fraction else ""
        if shape.recomputed_fraction < 1:
            turned += f", {shape.recomputed_fraction:.0%} of blocks computed again in the backward pass"
        seconds = self.choice.step_seconds
        time = f"{seconds * 1e3:.0f} ms" if seconds < 1 else format_seconds(seconds)
        busy = f"{NAMES.get(name, name)} busy {part:.0%} of it"
        return f"{self.choice.placement.said()}{turned}; about {time} a step, {busy}"

    def event(self) -> dict[str, Any]:
        """For the log."""
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


NAMES = {
    "ssd": "the SSD",
    "bus": "copies",
    "cores": "cores",
    "compute": "computing",
    "update": "the optimizer",
}
"""Of what serves the lanes, for a person."""


def to_standard_error(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr)


@dataclass(frozen=True)
class Planner:
    """Asked once, when an engine is made."""

    directory: str | Path
    commit_every: int
    limits: Limits
    say: Callable[[str], object] | None
    speed_up: float = 1.0
    """What all drives of the run take, over what its own does."""

    def predict(
        self,
        ask: Callable[[MachineProfile, Work], Question],
        work: Work,
        parts: Parts,
        device: Device,
        sample: Any,
        loss_fn: Callable[..., Any] | None,
    ) -> Prediction:
        """The best choice, or what is to be expected of the only one. ``ask`` makes the question of a machine and of a
        model whose times are known. Raises ``DoesNotFit``."""
        say = self.say or to_standard_error
        times = _timed(parts, device, sample, loss_fn)
        known = machine_at(
            nearest(Path(self.directory)),
            device.torch_device,
            lambda seconds: _block_times(times, work, device.torch_device),
            say,
            0 if has_commits(Path(self.directory)) else least_bytes(work),
        )
        machine = sped_up(within(known.profile, self.limits), self.speed_up)
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
    """Return whether the state of the run is there already."""
    return (run / "commits").is_dir()


def least_bytes(work: Work) -> int:
    """Return what the state of a run takes on its disk at least: two generations of everything."""
    return 2 * (sum(block.state_bytes for block in work.blocks) + work.resident_state_bytes)


def with_times(work: Work, times: Times, machine: MachineProfile) -> Work:
    """``work`` with as many floating-point operations as ``machine`` does in the ``times`` of its model. Blocks whose
    operations differ differ in time likewise."""
    rate = machine.device_flop_per_second
    first = work.blocks[0].forward_flop
    blocks = tuple(
        replace(
            block,
            forward_flop=times.forward_seconds * rate * (block.forward_flop / first if first else 1.0),
            backward_flop=times.backward_seconds * rate * (block.forward_flop / first if first else 1.0),
        )
        for block in work.blocks
    )
    return replace(work, blocks=blocks, head_flop=times.head_seconds * rate)


def within(machine: MachineProfile, limits: Limits) -> MachineProfile:
    """``machine`` with its SSD no faster than ``limits`` let it be."""
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
    """``machine`` with ``factor`` times its SSD."""
    mixed = machine.ssd_mixed_bytes_per_second
    return replace(
        machine,
        ssd_read_bytes_per_second=int(machine.ssd_read_bytes_per_second * factor),
        ssd_write_bytes_per_second=int(machine.ssd_write_bytes_per_second * factor),
        ssd_mixed_bytes_per_second=mixed and int(mixed * factor),
    )


# -- helpers ----------------------------------------------------------------------------------------


def _timed(parts: Parts, device: Device, sample: Any, loss_fn: Callable[..., Any] | None) -> Times | None:
    """None, with a warning, where the model cannot be timed."""
    try:
        times = time_model(parts.model, parts.blocks, sample, parts.resident.dtype, device, loss_fn)
        give_back_freed()
        return times
    except ModelNotSupported as error:
        warnings.warn(f"steps are predicted by their floating-point operations: {error}", stacklevel=7)
        return None


def _block_times(times: Times | None, work: Work, device: torch.device) -> BlockTimes:
    """For the machine's profile; without times, one matrix product's rate."""
    forward = work.blocks[0].forward_flop
    if times is None:
        return _of_a_product(device)
    seconds = times.forward_seconds + times.backward_seconds
    return BlockTimes(
        times.forward_seconds,
        times.backward_seconds,
        4 * max(forward, 1.0) / seconds,
        "a block of a run's model",
    )


def _of_a_product(device: torch.device) -> BlockTimes:
    """Of a block of which only the floating-point operations are known."""
    size = 1024
    one = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    float((one @ one)[0, 0])
    start = perf_counter()
    float((one @ one)[0, 0])
    seconds = perf_counter() - start
    return BlockTimes(seconds, 3 * seconds, 2 * size**3 / seconds, "a matrix product")


def nearest(directory: Path) -> Path:
    """``directory``, or what of its path is there."""
    directory = directory.absolute()
    while not directory.is_dir():
        directory = directory.parent
    return directory
