"""Device updates of tensors that are stored on the host and copied to the device a few at a time.

A device's kernels round otherwise than the host's. So the replica of a trainer on a device runs its updates on the same
device, and both have the same bits. Sizes are bytes.

1. Host memory is pinned once. One stream copies tensors from there, while the device updates earlier ones.
2. The compute stream waits for the copies' event, and updates the tensors.
3. A third stream waits for the update and copies the tensors back. The host memory must not be read before
   ``PinnedHomes.wait_for_copies``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...accelerators import current_stream, is_accelerator, new_stream, on_stream, record_event
from ...io.buffers import Buffer
from ...quantities import MiB, round_up
from .staging_buffers import pinned

VISIT_BYTES = 256 << 20
"""Bytes of the parameters copied together, with gradients and optimizer state; at least one parameter is copied."""

ARENA_BYTES = 64 * MiB
"""Bytes of host memory that are pinned together; a larger tensor is pinned by itself."""

ALIGN = 256
AWAY = 2
"""Groups of parameters that may still be on their way back when the next group is copied."""


class PinnedHomes:
    """Pinned host memory for tensors that are updated on ``device``, and the streams of both directions."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming, self._going = new_stream(device), new_stream(device)
        self._buffers: list[Buffer] = []
        self._left = 0
        """The free bytes of the newest buffer."""
        self._known: set[int] = set()
        """The addresses of tensors in this memory."""
        self._under_way: deque[Any] = deque()
        """The end event of each group on its way back."""
        self._newest: Any = None

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in pinned memory: itself, if it is there already. The copy of a device tensor has no values
        yet.
        """
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
        """Wait until at most ``AWAY`` groups are on their way back. Called before the next group is copied."""
        if self._newest is not None:
            self._under_way.append(self._newest)
            self._newest = None
        while len(self._under_way) > AWAY:
            self._under_way.popleft().synchronize()

    def come(self, homes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the device. The compute stream waits for them."""
        computing = current_stream(self._device)
        with on_stream(self._coming):
            there = [home.to(self._device, non_blocking=True, copy=True) for home in homes]
            computing.wait_event(record_event(self._coming))
        for tensor in there:
            tensor.record_stream(computing)
        return there

    def go(self, homes: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy ``tensors`` back to ``homes``, once the work queued on them now is over."""
        self._going.wait_event(record_event(current_stream(self._device)))
        with on_stream(self._going):
            torch._foreach_copy_(list(homes), list(tensors), non_blocking=True)
            self._newest = record_event(self._going)
        for tensor in tensors:
            tensor.record_stream(self._going)

    def wait_for_copies(self) -> None:
        """Return when all tensors are back in host memory."""
        if self._newest is not None:
            self._newest.synchronize()  # and all before it, on the same stream
        self._newest = None
        self._under_way.clear()

    def free(self) -> None:
        """Free the memory. Called when no tensor uses it any more."""
        self.wait_for_copies()
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


class StagedOnDevice:
    """A stay of ``parameter`` on ``device``, with its state in ``optimizer`` except for the names ``on_host``.

    With ``homes``, copies may still be under way after construction.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        on_host: Iterable[str],
        homes: PinnedHomes | None = None,
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
        """Copy everything back, or begin to, and return the names of optimizer state that stayed on the host."""
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
        """Return the host memory for ``tensor``: that of the same state before, if it fits."""
        home = self._homes.get(slot)
        if home is not None and (home.shape, home.dtype) == (tensor.shape, tensor.dtype):
            return home
        return (
            torch.empty_like(tensor, device="cpu") if self._pinned is None else self._pinned.at_home(tensor)
        )


def tensors_in(held: Mapping[str, object]) -> list[str]:
    """Return the names of the state that are tensors."""
    return [slot for slot, value in held.items() if isinstance(value, torch.Tensor)]


def visit_bytes(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that a parameter takes on the device, including its gradient and its optimizer state."""
    held = optimizer.state.get(parameter, {})
    return 2 * parameter.nbytes + sum(held[slot].nbytes for slot in tensors_in(held))
