"""Visiting: tensors that rest on the host, and go to a device, a few at a time, to be updated there.

A device's kernels round otherwise than the host's, so the replica of a trainer on a device has the same device do its
updates: then both have the same bits. Sizes are bytes. Not run on a device yet.

1. Homes are pinned once. On one stream tensors come from there, while the device updates those before them.
2. The stream that computes waits for their event, and updates them.
3. A third stream waits for the update and brings them home. Nobody may look at a home before ``Homes.settle``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..accelerators import current_stream, is_accelerator, new_stream, on_stream, record_event
from ..io.buffers import Buffer
from ..units import MiB, round_up
from .leaving import pinned

VISIT_BYTES = 256 << 20
"""Of parameters that go together, with their gradients and what their optimizer holds; one goes in any case."""

ARENA_BYTES = 64 * MiB
"""Homes that are pinned together; a larger one is pinned by itself."""

ALIGN = 256
AWAY = 2
"""Groups of parameters that may be on their way home when the next one goes."""


class Homes:
    """Pinned memory for tensors that visit ``device``, and the streams on which they come and go."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming, self._going = new_stream(device), new_stream(device)
        self._buffers: list[Buffer] = []
        self._left = 0
        """Of the newest buffer."""
        self._known: set[int] = set()
        """Addresses of homes."""
        self._under_way: deque[Any] = deque()
        """Of each group on its way home, the event of its end."""
        self._newest: Any = None

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in pinned memory: itself, if it is there. One on a device has no values there yet."""
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        if tensor.data_ptr() in self._known:
            return tensor
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        home = self._taken(tensor.nbytes).view(tensor.dtype).as_strided(tensor.shape, strides)
        self._known.add(home.data_ptr())
        return home if is_accelerator(tensor.device) else home.copy_(tensor)

    def make_room(self) -> None:
        """Wait until ``AWAY`` groups at most are on their way home. Called before the next one goes."""
        if self._newest is not None:
            self._under_way.append(self._newest)
            self._newest = None
        while len(self._under_way) > AWAY:
            self._under_way.popleft().synchronize()

    def come(self, homes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the device, which the stream that computes waits for."""
        computing = current_stream(self._device)
        with on_stream(self._coming):
            there = [home.to(self._device, non_blocking=True, copy=True) for home in homes]
            computing.wait_event(record_event(self._coming))
        for tensor in there:
            tensor.record_stream(computing)
        return there

    def go(self, homes: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy ``tensors`` to their homes, when what computes with them now is over."""
        self._going.wait_event(record_event(current_stream(self._device)))
        with on_stream(self._going):
            torch._foreach_copy_(list(homes), list(tensors), non_blocking=True)
            self._newest = record_event(self._going)
        for tensor in tensors:
            tensor.record_stream(self._going)

    def settle(self) -> None:
        """Return when all is at home."""
        if self._newest is not None:
            self._newest.synchronize()  # and all before it, on the same stream
        self._newest = None
        self._under_way.clear()

    def free(self) -> None:
        """Hand the memory back. Nothing rests in it any more."""
        self.settle()
        for buffer in self._buffers:
            if buffer.unpin is not None:
                buffer.unpin()
            buffer.free()
        self._buffers, self._left, self._known = [], 0, set()

    def _taken(self, nbytes: int) -> torch.Tensor:
        """Return the next ``nbytes`` of the arena."""
        nbytes = round_up(nbytes, ALIGN)
        if nbytes > self._left:
            buffer = Buffer(round_up(max(nbytes, ARENA_BYTES)), "replica")
            buffer.unpin = pinned(buffer.view, self._device, "the replica's state")
            self._buffers.append(buffer)
            self._left = buffer.nbytes
        view = self._buffers[-1].view
        start = len(view) - self._left
        self._left -= nbytes
        return torch.frombuffer(view[start : start + nbytes], dtype=torch.uint8)


class Visit:
    """``parameter`` on ``device``, with what its ``optimizer`` holds for it, but for the slots ``on_host``. With
    ``homes``, copies are under way when what began them returns."""

    def __init__(
        self,
        parameter: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        on_host: Iterable[str],
        homes: Homes | None = None,
    ) -> None:
        self._parameter, self._optimizer, self._pinned = parameter, optimizer, homes
        held = optimizer.state.get(parameter, {})
        names = [slot for slot in tensors_in(held) if slot not in on_host]
        resting = [parameter.data, *(held[slot] for slot in names)]
        if homes is None:
            there = [home.to(device, copy=True) for home in resting]
        else:
            resting = [homes.at_home(tensor) for tensor in resting]
            there = homes.come(resting)
        self._home, self._homes = resting[0], dict(zip(names, resting[1:], strict=True))
        parameter.data = there[0]
        held.update(zip(names, there[1:], strict=True))

    @torch.no_grad()
    def end(self) -> set[str]:
        """All is at home again, or on its way. Returns the slots that the optimizer had on the host meanwhile."""
        device = self._parameter.device
        held = self._optimizer.state.get(self._parameter, {})
        stayed = {slot for slot in tensors_in(held) if held[slot].device != device}
        names = [slot for slot in tensors_in(held) if slot not in stayed]
        tensors = [self._parameter.data, *(held[slot] for slot in names)]
        homes = [self._home, *(self._home_of(slot, held[slot]) for slot in names)]
        if self._pinned is None:
            torch._foreach_copy_(homes, tensors)
        else:
            self._pinned.go(homes, tensors)
        self._parameter.data = self._home
        held.update(zip(names, homes[1:], strict=True))
        return stayed

    def _home_of(self, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        """Where ``tensor`` is to rest: where the slot did, if it fits there."""
        home = self._homes.get(slot)
        if home is not None and (home.shape, home.dtype) == (tensor.shape, tensor.dtype):
            return home
        return (
            torch.empty_like(tensor, device="cpu") if self._pinned is None else self._pinned.at_home(tensor)
        )


def tensors_in(held: Mapping[str, object]) -> list[str]:
    """The slots that hold tensors."""
    return [slot for slot, value in held.items() if isinstance(value, torch.Tensor)]


def visit_bytes(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    """What a parameter takes on the device, its gradient included."""
    held = optimizer.state.get(parameter, {})
    return 2 * parameter.nbytes + sum(held[slot].nbytes for slot in tensors_in(held))
