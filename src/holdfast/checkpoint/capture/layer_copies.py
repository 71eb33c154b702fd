"""Copies of gradients one by one, each as soon as backward has it, while backward continues.

A gradient is copied when it has been accumulated for the last time, judged by the iteration before. Only the
optimizer's pre-hook knows what the optimizer consumes. So the pre-hook copies every gradient again that has changed
since its copy: its version, its place in memory, another accumulation, or some of its values. Values are compared
because ``GradScaler.unscale_`` and edits through ``.data`` leave the version as it is.

With several ranks two kinds of gradients are copied early: shards, which FSDP2 sets when it has reduced them, and those
that ``early_averages`` reports, bucket by bucket. Others are reduced later than torch reports them, and are copied at
the pre-hook.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast import failpoints

from ...state.encoding import encode
from ...state.layout.regions import is_distributed, local_of
from ..compression.codecs import Trained
from .early_averages import AveragingState
from .optimizer_hooks import OptimizerHooks, Update
from .staging_buffers import StagingBuffer

SAMPLES = 16
"""The number of values of a gradient that are compared with its copy."""


@dataclass(frozen=True)
class _Copied:
    slot: StagingBuffer
    version: tuple[int, int]
    address: int

    @classmethod
    def of(cls, slot: StagingBuffer, grad: torch.Tensor) -> _Copied:
        held = local_of(grad)
        return cls(slot, (grad._version, held._version), held.data_ptr())


class LayerHooks(OptimizerHooks):
    """A tap that copies while backward runs; where it clips, it returns the factor for the copies."""

    def __init__(
        self, *args: Any, alone: bool = True, averaging: AveragingState | None = None, **kwargs: Any
    ) -> None:
        """Prepare a tap; all other arguments are those of ``OptimizerHooks``.

        Args:
            alone: True if no other ranks reduce their gradients with these.
            averaging: Reports when gradients have been averaged.
        """
        super().__init__(*args, **kwargs)
        self._alone, self._averaging = alone, averaging
        self.copied_again = 0
        """The number of gradients copied a second time since the tap was made."""
        self._early: StagingBuffer | None = None
        self._copied: dict[str, _Copied] = {}
        self._seen: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._parameter_hooks: list[Any] = []
        self._trained: dict[int, tuple[str, int]] = {}
        """The name and the optimizer of each stored parameter, by the parameter's ``id``."""

    def attach(self) -> None:
        super().attach()
        self._let_parameters_go()
        self._watch_parameters()

    def discard(self) -> list[Update]:
        """Return the updates of the unfinished iteration, and forget them, with the copies that were made early.

        The staging buffer of early copies is not returned: another timeline gets other buffers.
        """
        self._stop_copying()
        self._early, self._seen = None, {}
        self._copied.clear()
        return super().discard()

    def detach(self) -> None:
        super().detach()
        self._let_parameters_go()

    def watch(self, state: Any) -> None:
        super().watch(state)
        self._let_parameters_go()
        self._early = None
        self._copied.clear()
        self._watch_parameters()

    def take(self) -> list[Update]:
        updates = super().take()
        if updates:
            self._stop_copying()
            self._early, self._expected, self._seen = None, self._seen, {}
            self._copied.clear()
        return updates

    def _watch_parameters(self) -> None:
        optimizer_of = {
            id(p): index
            for index, optimizer in enumerate(self._state.optimizers)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._trained = {
            id(captured.parameter): (captured.name, optimizer_of[id(captured.parameter)])
            for captured in self._state.stored
            if captured.parameter.requires_grad and id(captured.parameter) in optimizer_of
        }
        for parameter in (captured.parameter for captured in self._state.stored):
            if id(parameter) in self._trained and (self._alone or is_distributed(parameter)):
                hook = parameter.register_post_accumulate_grad_hook(self.accumulated)
                self._parameter_hooks.append(hook)
        if self._averaging is not None:
            self._averaging.listener = self

    def _let_parameters_go(self) -> None:
        self._stop_copying()
        if self._averaging is not None and self._averaging.listener is self:
            self._averaging.listener = None
        for hook in self._parameter_hooks:
            hook.remove()
        self._parameter_hooks.clear()

    def _stop_copying(self) -> None:
        if self._averaging is not None:
            self._averaging.over()

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Copy the gradient of ``parameter``: its post-accumulation hook. Called inside backward."""
        grad = parameter.grad
        if (target := self.place_of(parameter, grad)) is not None and grad is not None:
            started = time.perf_counter()
            _copy_to([target], [grad])
            self.arrived(parameter)
            self.seconds += time.perf_counter() - started

    def place_of(self, parameter: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return where to copy ``grad``, which the parameter has or will have.

        Returns None if the gradient will change or has no place. Called inside backward, and may wait for memory.
        """
        started = time.perf_counter()
        try:
            return self._place_of(parameter, grad)
        finally:
            self.seconds += time.perf_counter() - started

    def _place_of(self, parameter: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
        name, index = self._trained.get(id(parameter), ("", -1))
        if not name:
            return None
        self._copied.pop(name, None)
        self._seen[name] = self._seen.get(name, 0) + 1
        if grad is None or self._seen[name] < self._expected.get(name, 1):
            return None
        if any(update.optimizer == index for update in self.updates):
            return None  # the buffer holds what it consumed
        if self._early is None or not self._early.tensors:  # freed since, if a skipped step took it
            self._early = self.updates[-1].slot if self.updates else self._take_slot()
        target = None if self._early is None else self._early.tensors[index].get(name)
        return target if _fits(local_of(grad), target) else None

    def arrived(self, parameter: torch.Tensor) -> None:
        """Note that a copy of the parameter's gradient is complete. Called inside backward."""
        name, _ = self._trained.get(id(parameter), ("", -1))
        if name and self._early is not None and parameter.grad is not None:
            self._copied[name] = _Copied.of(self._early, parameter.grad)
            failpoints.reach("after_gradient_copied")

    def _slot_for(self, index: int) -> StagingBuffer | None:
        if not self.updates and self._early is not None and self._early.tensors:
            return self._early
        return super()._slot_for(index)

    def _consume(
        self, slot: StagingBuffer | None, index: int, trained: Trained, skipped: bool
    ) -> tuple[memoryview | None, Any]:
        self._stop_copying()
        grads = {name: p.grad for name, p in trained if p.grad is not None}
        if slot is not None:
            again = self._stale(slot, index, {n: grad for n, grad in grads.items() if n in self._stored})
            self.copied_again += len(again)
            _copy_to([slot.tensors[index][name] for name in again], [*again.values()])
        started = time.perf_counter()
        coefficient = self._clipped(index, grads)
        self.seconds -= time.perf_counter() - started  # clipping is the script's own work
        told = None if coefficient is None else encode(coefficient)
        return None if slot is None else slot.parts[index], told

    def _stale(
        self, slot: StagingBuffer, index: int, grads: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return those of ``grads`` whose current values ``slot`` does not hold."""
        as_copied, again = {}, {}
        for name, grad in grads.items():
            same = self._copied.get(name) == _Copied.of(slot, grad)
            (as_copied if same else again)[name] = grad
        if not all(_agree(slot.tensors[index][name], local_of(grad)) for name, grad in as_copied.items()):
            return grads  # somebody changes them unseen, maybe also where no sample is
        return again


def _fits(grad: torch.Tensor, target: torch.Tensor | None) -> bool:
    return target is not None and (target.shape, target.dtype) == (grad.shape, grad.dtype)


@torch.no_grad()
def _copy_to(targets: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Copy ``grads`` to their places in a staging buffer. The copies are complete on return."""
    if targets:
        torch._foreach_copy_([*targets], [local_of(grad) for grad in grads])


def _agree(copy: torch.Tensor, grad: torch.Tensor) -> bool:
    """Return whether some sampled values are the same in both."""
    if not grad.is_contiguous() or grad.device != copy.device:
        return True
    step = max(1, grad.numel() // SAMPLES)
    return torch.equal(copy.view(-1)[::step], grad.detach().view(-1)[::step])
