"""Averaging: ranks of ``DistributedDataParallel`` average their gradients as ever, and each bucket is copied as soon as
it has been averaged, while backward goes on with the rest.

torch tells of a bucket only by a communication hook. What it averages the hook does itself, in the same operations:
each rank multiplies by one over their number, and the sums are formed by one all-reduce of each bucket.
"""

# Annotations are evaluated here: torch looks at those of a hook.

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn


class Listener(Protocol):
    """Who takes gradients."""

    def place_of(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """Where a copy of the parameter's averaged gradient is to go; None if it is not wanted now."""
        ...

    def arrived(self, parameter: torch.Tensor) -> None:
        """The copy is there, and is what ``parameter.grad`` holds."""
        ...


@dataclass
class AveragingState:
    """What the hook keeps: ``model.register_comm_hook(AveragingState(group), averaging_hook)``."""

    group: dist.ProcessGroup | None = None
    listener: Listener | None = None
    """None where gradients are averaged as without the hook, which cannot be taken off a model again."""
    _backward: "_Backward | None" = None
    _lock: Any = field(default_factory=threading.Lock)

    def handed(self, bucket: dist.GradBucket) -> Callable[[], None] | None:
        """What is to be done when ``bucket`` has been averaged. Runs inside backward."""
        number = torch._C._current_graph_task_id()
        if self.listener is None or number < 0:  # Join plays a backward pass of a rank that has none
            return None
        if self._backward is None or self._backward.number != number:
            backward = _Backward(number, self.listener)
            with self._lock:
                self._backward = backward
            backward.watch()
        return self._copier(self._backward, self._backward.places(bucket))

    def _copier(
        self, backward: "_Backward", pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Callable[[], None]:
        def copy() -> None:
            with self._lock, torch.no_grad():
                if pairs and self._backward is backward:  # else it failed, and its memory is another step's
                    torch._foreach_copy_([target for target, _ in pairs], [grad for _, grad in pairs])

        return copy

    def over(self) -> None:
        """No copy is begun or under way from here on that belongs to a backward pass before."""
        with self._lock:
            self._backward = None


class _Backward:
    """One backward pass, and the gradients that were handed over in it."""

    def __init__(self, number: int, listener: Listener) -> None:
        self.number, self._listener = number, listener
        self._handed: list[tuple[torch.Tensor, int]] = []
        self._versions: list[int | None] = []

    def places(self, bucket: dist.GradBucket) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if (target := self._listener.place_of(parameter, grad)) is not None:
                found.append((target, grad))
                self._handed.append((parameter, grad.data_ptr()))
        return found

    def watch(self) -> None:
        """torch writes the averages to the gradients in a callback at the end, which it queues with the last bucket.
        What is queued now runs before that, and what that queues runs behind it."""
        _at_the_end(self._before_written)

    def _before_written(self) -> None:
        self._versions = [_version_of(parameter) for parameter, _ in self._handed]
        _at_the_end(self._written)

    def _written(self) -> None:
        """Gradients of parameters that no rank used are left as they were: the copy is of something else."""
        for (parameter, address), before in zip(self._handed, self._versions, strict=False):
            grad = parameter.grad
            if grad is not None and (grad.data_ptr() == address or grad._version != before):
                self._listener.arrived(parameter)


def _version_of(parameter: torch.Tensor) -> int | None:
    return None if parameter.grad is None else parameter.grad._version


def _at_the_end(callback: Callable[[], None]) -> None:
    """Of the backward pass that is under way, behind what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def averaging_hook(state: AveragingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks of the bucket's gradients, bit for bit as without a hook."""
    group = state.group or dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer().mul_(1 / group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    copy = state.handed(bucket)

    def averaged(future: torch.futures.Future[Any]) -> torch.Tensor:
        [total] = future.value()
        if copy is not None:
            copy()
        return total

    return work.get_future().then(averaged)


def averaging(model: nn.Module) -> AveragingState | None:
    """The hook on ``model``, put there if there was none; None where gradients are averaged otherwise: not by
    ``DistributedDataParallel``, by a hook of the script's, or where a hook could change bits.

    With gradients that are views of buckets torch divides some by the number of ranks and multiplies others, which is
    the same where that is a power of two.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    world_size = dist.get_world_size(model.process_group)
    if model.gradient_as_bucket_view and world_size & (world_size - 1):
        return None
    if not model._comm_hooks:
        state = AveragingState(model.process_group)
        try:
            model.register_comm_hook(state, averaging_hook)
        except RuntimeError:  # one of torch's own was registered, in C++
            return None
        return state
    [*_, (_, there)] = model._comm_hooks
    return there if isinstance(there, AveragingState) else None
