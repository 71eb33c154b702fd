"""The planner's answer for the machine, the model and the micro-batches at hand. Seconds, bytes.

The machine's rates come from its profile (``machine_probe``), within the limits that the run was given. The times of
the model's block and head are measured each time (``time_model``), with real tensors: one block and the code outside of
the blocks get parameters of random numbers, in the dtype of the run. The model's own code runs from its first line to
its loss, and the other blocks pass on the output of the first. So no model is too large to be timed: the memory needed
is what the engine takes for a step. The choice changes a run's speed, never its numbers, and no random generator.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...accelerators import synchronize
from ...errors import ModelNotSupported
from ...events import tell
from ...measure.drive_rates import Limits, nearest
from ...measure.machine_probe import BlockTimes, CachedProfile, machine_at
from ...profiles import MachineProfile
from ...quantities import format_seconds
from ...schedule.planner.machine_rates import RESOURCE_NAMES
from ...schedule.planner.placement_search import Choice, Question, answer, play
from ...schedule.work import StepShape, Work
from .. import rng
from ..memory.device import Device
from ..memory.residency import add_in_parts
from ..model.blocks import Blocks, Patch
from ..model.microbatches import extract_loss, module_call
from ..model.model_parts import ModelParts
from .block_measurement import detached, moves, moving, restored, swapped
from .process_settings import callers_default, give_back_freed


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
    times: BlockTimer | None
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
    """Return whether ``run`` holds commits, so that its state takes no further space."""
    return (run / "commits").is_dir()


def least_bytes(work: Work) -> int:
    """Return the least bytes that the state takes on disk: two generations of everything."""
    return 2 * (sum(block.state_bytes for block in work.blocks) + work.resident_state_bytes)


def with_times(work: Work, times: BlockTimer, machine: MachineProfile) -> Work:
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


def _timed(
    parts: ModelParts, device: Device, sample: Any, loss_fn: Callable[..., Any] | None
) -> BlockTimer | None:
    """Return the measured times; None, with a warning, where the model cannot be timed."""
    try:
        times = time_model(parts.model, parts.blocks.repeated, sample, parts.resident.dtype, device, loss_fn)
        give_back_freed()
        return times
    except ModelNotSupported as error:
        warnings.warn(f"steps are predicted by their floating-point operations: {error}", stacklevel=9)
        return None


def _block_times(times: BlockTimer | None, work: Work, device: torch.device) -> BlockTimes:
    """Return a block's times for the machine's profile; without ``times``, those of a matrix product."""
    forward = _first_flop(work)
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
    """Time a matrix product, for a block of which only the floating-point operations are known."""
    size = 1024
    one = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    float((one @ one)[0, 0])
    start = perf_counter()
    float((one @ one)[0, 0])
    seconds = perf_counter() - start
    return BlockTimes(seconds, 3 * seconds, 2 * size**3 / seconds, "a matrix product")


TIMES = 9
"""Largest number of times that each is timed; the median is taken."""
RANDOM_ELEMENTS = 64 * 2**20
"""Most elements of a parameter that gets random numbers; larger ones get one number."""


@dataclass(frozen=True, kw_only=True)
class BlockTimer:
    """Times of one micro-batch, in seconds."""

    forward_seconds: float
    """Forward through one block."""
    backward_seconds: float
    """Backward through one block, with the recomputation, and with its gradients added to their sums."""
    head_seconds: float
    """The code before and after the blocks, with the loss, forward and backward."""


def time_model(
    model: nn.Module,
    blocks: Blocks,
    sample: Any,
    dtype: torch.dtype,
    device: Device,
    loss_fn: Callable[..., Any] | None = None,
    seconds: float = 2.0,
) -> BlockTimer:
    """Time the model for about ``seconds``, at least once.

    Raises ``ModelNotSupported`` if the model cannot be run this way.
    """
    try:
        return _Timing(model, blocks, dtype, device, seconds).run(sample, loss_fn)
    except Exception as error:
        raise ModelNotSupported(f"{type(model).__name__} cannot be timed: {error}") from error


@dataclass
class _Timing:
    model: nn.Module
    blocks: Blocks
    dtype: torch.dtype
    device: Device
    seconds: float
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.patch = Patch(self.blocks, self.call)
        self.output: Any = None
        self.timed = False
        self.outside = 0.0
        """Seconds of the head until ``mark``."""
        self.mark = 0.0

    def run(self, sample: Any, loss_fn: Callable[..., Any] | None) -> BlockTimer:
        inputs = self.device.take_batch(dict(sample) if isinstance(sample, Mapping) else sample)
        ends = time.perf_counter() + self.seconds
        with (
            rng.preserved_generators(self.device.torch_device),
            restored(self.model),
            _random_parameters(self.model, self.blocks, self.dtype, self.device.torch_device),
            self.patch.applied(),
            torch.enable_grad(),
            callers_default(),
        ):
            while len(self.head) < 2 or (time.perf_counter() < ends and len(self.head) <= TIMES):
                self.once(inputs, loss_fn)
        forward, backward, head = (
            median(found[1:]) for found in (self.forward, self.backward, self.head)
        )  # the first has started kernels
        return BlockTimer(forward_seconds=forward, backward_seconds=backward, head_seconds=head)

    def once(self, inputs: Any, loss_fn: Callable[..., Any] | None) -> None:
        self.outside, self.mark = 0.0, self.now()
        loss = extract_loss(module_call(self.model, inputs, loss_fn)())
        loss.backward()
        self.head.append(self.outside + self.now() - self.mark)
        self.output = None

    def call(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replacement for the blocks' forward."""
        self.outside += self.now() - self.mark
        last = index == len(self.patch.forwards) - 1
        if index == 0:
            self.timed = False
        if not self.timed:
            self.timed = last or any(moves(leaf) for leaf in pytree.tree_leaves((args, kwargs)))
            self.output = (self.block if self.timed else self.begin)(args, kwargs)
        output = detached(self.output) if last or index == 0 else self.output
        self.mark = self.now()
        return output

    def begin(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the inputs of the next block where nothing before the first one is trained.

        In training the next block's inputs need gradients nonetheless, so it is timed with those.
        """
        with torch.no_grad():
            return moving(self.patch.forwards[0](*args, **kwargs), (args, kwargs))

    def block(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Time the first block, and the backward of the code before it."""
        forward, inputs = self.patch.forwards[0], detached((args, kwargs))
        start = self.now()
        with torch.no_grad():
            forward(*inputs[0], **inputs[1])
        between = self.now()
        output = forward(*inputs[0], **inputs[1])
        roots = [leaf for leaf in pytree.tree_leaves(output) if moves(leaf)]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        end = self.now()
        self.forward.append(between - start)
        self.backward.append(end - between)
        before = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if moves(leaf) and leaf.grad_fn is not None
        ]
        if before:
            torch.autograd.backward(before, [torch.ones_like(leaf) for leaf in before])
            self.outside += self.now() - end
        return detached(output)

    def now(self) -> float:
        synchronize(self.device.torch_device)
        return time.perf_counter()


def _random_parameters(
    model: nn.Module, blocks: Blocks, dtype: torch.dtype, device: torch.device
) -> AbstractContextManager[None]:
    """Give the first block and the code outside of the blocks random parameters, inside the context.

    Their gradients are added to fp32 sums as in training, and buffers are on the device. The other blocks' parameters
    stay as they are.
    """
    others = {id(m) for block in blocks.modules[1:] for m in block.modules()}
    modules = (m for m in model.modules() if id(m) not in others)
    return swapped(modules, lambda p: _summed(p, dtype, device), lambda b: b.to(device, copy=True))


def _summed(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter of random numbers, whose gradients are added to an fp32 sum as in training."""
    values = torch.empty(parameter.shape, dtype=dtype, device=device)
    small = values.numel() <= RANDOM_ELEMENTS
    new = nn.Parameter(values.normal_(0.0, 0.02) if small else values.fill_(0.01), parameter.requires_grad)
    if new.requires_grad:
        total = torch.zeros(parameter.shape, dtype=torch.float32, device=device)

        def collect(p: torch.Tensor) -> None:
            assert p.grad is not None
            add_in_parts(total, p.grad)
            p.grad = None

        new.register_post_accumulate_grad_hook(collect)
    return new
