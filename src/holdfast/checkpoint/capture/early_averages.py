"""Early copies of averaged gradients under ``DistributedDataParallel``, while backward is still running.

Each bucket is copied as soon as it has been averaged. torch announces a bucket only to a communication hook, and leaves
the averaging to the hook. The hook here uses the same operations as DDP without a hook, so the bits are the same: each
rank multiplies by one over the number of ranks, and one all-reduce of each bucket sums.
"""

# No postponed annotations in this file: torch inspects those of a hook.

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn


class Listener(Protocol):
    """A receiver of averaged gradients."""

    def place_of(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor to copy the parameter's averaged gradient into; None if it is not wanted now."""
        ...

    def arrived(self, parameter: torch.Tensor) -> None:
        """Note that the copy is complete and equals ``parameter.grad``."""
        ...


@dataclass
class AveragingState:
    """The state of the hook: ``model.register_comm_hook(AveragingState(group), averaging_hook)``."""

    group: dist.ProcessGroup | None = None
    listener: Listener | None = None
    """None where the hook only averages; a hook cannot be removed from a model."""
    _backward: "_Backward | None" = None
    _lock: Any = field(default_factory=threading.RLock)
    """A reentrant lock, since the script's signal handler may close the checkpointer in the middle of a copy."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copy or a pickle of the model a hook without a listener."""
        return AveragingState, ()

    def handed(self, bucket: dist.GradBucket) -> Callable[[], None] | None:
        """Return the function that copies ``bucket`` once it has been averaged; None if nothing is copied.

        Called inside backward.
        """
        number = torch._C._current_graph_task_id()
        if self.listener is None or number < 0:  # Join simulates the backward pass of a rank that has none
            return None
        backward = self._backward
        if backward is None or backward.number != number:
            backward = _Backward(number, self.listener)
            with self._lock:
                self._backward = backward
            backward.watch()
        places = backward.places(bucket)

        def copy() -> None:
            with self._lock:
                if self._backward is backward:  # otherwise it failed, and its memory is another step's
                    backward.copy(places)

        return copy

    def over(self) -> None:
        """End all copies of earlier backward passes: none is begun or running after this returns."""
        with self._lock:
            self._backward = None


class _Backward:
    """One backward pass, and the gradients that it handed over."""

    def __init__(self, number: int, listener: Listener) -> None:
        self.number, self._listener = number, listener
        self._handed: list[torch.Tensor] = []
        self._copied: list[_Place] = []
        self._versions: dict[int, int | None] = {}
        self._gave_up = False

    def places(self, bucket: dist.GradBucket) -> "list[_Place]":
        """Return where the bucket's gradients are to be copied.

        Gradients of parameters that are not contiguous are left out: a bucket keeps the parameter's memory order, and
        returns them as if it were contiguous.
        """
        found: list[_Place] = []
        # An error here is raised at the optimizer's step instead, when no rank waits for a bucket of this one any more.
        try:
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=False):
                if self._gave_up or not parameter.is_contiguous():
                    continue
                if (target := self._listener.place_of(parameter, grad)) is not None:
                    found.append(_Place(parameter, grad, target))
        except Exception:
            self._gave_up = True
            return []
        self._handed += [place.parameter for place in found]
        return found

    @torch.no_grad()
    def copy(self, places: "list[_Place]") -> None:
        if places:
            torch._foreach_copy_([place.target for place in places], [place.grad for place in places])
            self._copied += places

    def watch(self) -> None:
        """Queue the check that runs around torch's own callback at the end of backward.

        torch writes the averages to the gradients in a callback that it queues with the last bucket. A callback queued
        now runs before that one, and a callback queued by it runs after.
        """
        _at_the_end(self._before_written)

    def _before_written(self) -> None:
        self._versions = {id(parameter): _version_of(parameter) for parameter in self._handed}
        _at_the_end(self._written)

    def _written(self) -> None:
        """Report the copies that equal their gradients.

        torch leaves the gradients of parameters that no rank used as they were, so the copy holds something else. A
        bucket handed over in one of several nested passes may not be averaged yet when that pass ends.
        """
        for parameter, average, _ in self._copied:
            grad = parameter.grad
            if grad is None or id(parameter) not in self._versions:
                continue
            was_written = grad._version != self._versions[id(parameter)]
            if was_written or grad.data_ptr() == average.data_ptr():
                self._listener.arrived(parameter)


class _Place(NamedTuple):
    parameter: torch.Tensor
    grad: torch.Tensor
    target: torch.Tensor


def _version_of(parameter: torch.Tensor) -> int | None:
    return None if parameter.grad is None else parameter.grad._version


def _at_the_end(callback: Callable[[], None]) -> None:
    """Queue ``callback`` for the end of the current backward pass, behind those queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def averaging_hook(state: AveragingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks of the bucket's gradients, bit for bit as without a hook."""
    future = averaged(state.group, bucket)
    copy = state.handed(bucket)
    if copy is None:
        return future

    def copied(average: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        total = average.value()
        copy()
        return total

    return future.then(copied)


def averaged(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as ``DistributedDataParallel`` does without a hook; torch's own hook divides instead."""
    group = group or dist.group.WORLD
    assert group is not None
    work = dist.all_reduce(bucket.buffer().mul_(1 / group.size()), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def averaging(model: nn.Module) -> AveragingState | None:
    """Return the state of the hook on ``model``; register the hook if there is none.

    Returns None where gradients are averaged otherwise: not by ``DistributedDataParallel``, by a hook of the script, or
    where a hook could change bits. The last happens where gradients are views of buckets, or are copied into buckets
    together: torch then divides by the number of ranks instead of multiplying, which is the same only for a power of
    two.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    there, world_size = getattr(model, "_comm_hooks", None), dist.get_world_size(model.process_group)
    if there is None or getattr(model, "_use_python_reducer", False):
        return None  # torch's C++ averages nothing here
    if there:
        _, state = there[-1]
        return state if isinstance(state, AveragingState) else None
    divides = model.gradient_as_bucket_view or getattr(model, "batched_grad_copy", False)
    if divides and world_size & (world_size - 1):
        return None
    state = AveragingState(model.process_group)
    try:
        model.register_comm_hook(state, averaging_hook)
    except RuntimeError:  # one of torch's own was registered, in C++
        there.clear()
        return None
    return state
