"""Averaging: ranks of ``DistributedDataParallel`` average their gradients as ever, and each bucket is copied as soon as
it has been averaged, while backward goes on with the rest.

torch tells of a bucket only by a communication hook. What it averages the hook does itself, in the same operations:
each rank multiplies by one over their number, and the sums are formed by one all-reduce of each bucket.
"""

# Annotations are evaluated here: torch looks at those of a hook.

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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
    _lock: Any = field(default_factory=threading.RLock)
    """One that the script's handler of a signal may take again, to close what copies."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Who copies or pickles the model has one without a listener."""
        return AveragingState, ()

    def handed(self, bucket: dist.GradBucket) -> Callable[[], None] | None:
        """What is to be done when ``bucket`` has been averaged. Runs inside backward."""
        number = torch._C._current_graph_task_id()
        if self.listener is None or number < 0:  # Join plays a backward pass of a rank that has none
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
                if self._backward is backward:  # else it failed, and its memory is another step's
                    backward.copy(places)

        return copy

    def over(self) -> None:
        """No copy is begun or under way from here on that belongs to a backward pass before."""
        with self._lock:
            self._backward = None


class _Backward:
    """One backward pass, and the gradients that were handed over in it."""

    def __init__(self, number: int, listener: Listener) -> None:
        self.number, self._listener = number, listener
        self._handed: list[torch.Tensor] = []
        self._copied: list[_Place] = []
        self._versions: dict[int, int | None] = {}
        self._gave_up = False

    def places(self, bucket: dist.GradBucket) -> "list[_Place]":
        """Where the bucket's gradients are to be copied. None of those that do not lie in rows: a bucket has them as
        the parameter lies, and gives them as if it lay in rows."""
        found: list[_Place] = []
        # What raises here is told at the optimizer's step, when no rank waits for a bucket of this one any more.
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
        """torch writes the averages to the gradients in a callback at the end, which it queues with the last bucket.
        What is queued now runs before that, and what that queues runs behind it."""
        _at_the_end(self._before_written)

    def _before_written(self) -> None:
        self._versions = {id(parameter): _version_of(parameter) for parameter in self._handed}
        _at_the_end(self._written)

    def _written(self) -> None:
        """Gradients of parameters that no rank used are left as they were: the copy is of something else. A bucket that
        is handed over in one of several nested passes may not have been averaged yet when that ends."""
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
    """Of the backward pass that is under way, behind what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def averaging_hook(state: AveragingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks of the bucket's gradients, bit for bit as without a hook."""
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
    """What ``DistributedDataParallel`` makes of a bucket where it has no hook; torch's own hook divides instead."""
    group = group or dist.group.WORLD
    assert group is not None
    work = dist.all_reduce(bucket.buffer().mul_(1 / group.size()), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def averaging(model: nn.Module) -> AveragingState | None:
    """The hook on ``model``, put there if there was none; None where gradients are averaged otherwise: not by
    ``DistributedDataParallel``, by a hook of the script's, or where a hook could change bits.

    Where gradients are views of buckets, or are put into them together, torch divides by the number of ranks instead of
    multiplying, which is the same where that is a power of two.
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
