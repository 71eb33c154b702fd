"""The measured times of one micro-batch, with real tensors, in a block and in the rest of the model. Seconds.

One block and the code outside of the blocks get parameters of random numbers, in the dtype of the run. The model's own
code runs from its first line to its loss, and the other blocks pass on the output of the first. So no model is too
large to be timed: the memory needed is what the engine takes for a step. Nothing is changed by it, also no random
generator. Called by ``automatic_placement``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...accelerators import synchronize
from ...errors import ModelNotSupported
from .. import rng
from ..memory.device import Device
from ..memory.residency import add_in_parts
from ..model.blocks import Blocks, Patch
from ..model.microbatches import extract_loss, module_call
from .block_measurement import detached, moves, moving, restored, swapped
from .process_settings import callers_default

MOST_RUNS = 9
"""Largest number of times that each is timed; the median is taken."""
RANDOM_ELEMENTS = 64 * 2**20
"""Most elements of a parameter that gets random numbers; larger ones get one number."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchTimes:
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
) -> MicroBatchTimes:
    """Time the model for about ``seconds``, at least once.

    Raises ``ModelNotSupported`` if the model cannot be run this way.
    """
    try:
        return _ModelTimer(model, blocks, dtype, device, seconds).run(sample, loss_fn)
    except Exception as error:
        raise ModelNotSupported(f"{type(model).__name__} cannot be timed: {error}") from error


@dataclass
class _ModelTimer:
    """Times one micro-batch in the first block and in the rest of the model."""

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

    def run(self, sample: Any, loss_fn: Callable[..., Any] | None) -> MicroBatchTimes:
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
            while len(self.head) < 2 or (time.perf_counter() < ends and len(self.head) <= MOST_RUNS):
                self.once(inputs, loss_fn)
        forward, backward, head = (
            median(found[1:]) for found in (self.forward, self.backward, self.head)
        )  # the first has started kernels
        return MicroBatchTimes(forward_seconds=forward, backward_seconds=backward, head_seconds=head)

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
