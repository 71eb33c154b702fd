"""Leaving: copies from a device to the host while training goes on.

Copies go into pinned memory and end whenever they end: the thread that writes waits for them, not the one that trains.

1. Gradients are copied on the device first, on the stream that trains: an optimizer may overwrite them then. That takes
   a hundredth of the time that the bus takes.
2. A stream beside brings that copy to the host, while the device trains on.
3. The event behind it is waited for by the thread that writes (``recorder``, ``post``), which has made the device its
   own: a new thread has device 0, and would make a context there.

Where the device has no room for step 1, gradients leave on the stream that trains, which stops for that time. Not run
on a device yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..accelerators import (
    CannotPin,
    current_stream,
    devices_of,
    free_bytes,
    marks,
    new_stream,
    on_stream,
    pin,
    record_event,
)
from ..units import format_bytes


class Leaving:
    """Copies of ``tensors`` that are on their way."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copies = {key: copied(tensor) for key, tensor in tensors.items()}
        self._marks = marks(devices_of(tensors.values()))

    def arrived(self) -> dict[str, torch.Tensor]:
        """The copies, when they are there."""
        for mark in self._marks:
            mark.synchronize()
        return self._copies


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in pinned memory of torch's, that may be under way."""
    return tensor.detach().to("cpu", non_blocking=True, copy=True)


class Departures:
    """Begins copies from ``devices`` to pinned memory. Used by the thread that trains."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._of = {device: _Departure(device) for device in devices}

    @property
    def devices(self) -> list[torch.device]:
        return list(self._of)

    @torch.no_grad()
    def send(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], lasting: bool = False
    ) -> list[Any]:
        """Begin to copy ``sources`` into ``targets``. Returns events of the end; what is on the host is there at once.

        Args:
            lasting: nobody writes to the sources after this, and nobody else holds them.
        """
        pairs: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            pairs.setdefault(source.device, []).append((target, source))
        found = []
        for device, of_device in pairs.items():
            theirs = [target for target, _ in of_device], [source for _, source in of_device]
            if device in self._of:
                found.append(self._of[device].send(*theirs, lasting))
            else:
                torch._foreach_copy_(*theirs)
        return found


class _Departure:
    """From one ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = new_stream(device)
        self._stages: bool | None = None
        """Whether the device has room for a copy of what leaves; None before the first."""

    def send(self, targets: list[torch.Tensor], sources: list[torch.Tensor], lasting: bool) -> Any:
        """Begin to copy ``sources`` into ``targets``. Returns the event of the end."""
        computing = current_stream(self._device)
        staged, memory = (sources, sources) if lasting else self._staged(sources)
        if not memory:
            torch._foreach_copy_(targets, sources, non_blocking=True)
            return record_event(computing)
        self._beside.wait_event(record_event(computing))
        with on_stream(self._beside):
            torch._foreach_copy_(targets, staged, non_blocking=True)
            mark = record_event(self._beside)
        for each in memory:
            each.record_stream(
                self._beside
            )  # else the allocator gives it to a later kernel before it was read
        return mark

    def _staged(self, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of ``sources`` on the device, and the memory that they are in: none where there is no room."""
        if self._stages is None:
            self._stages = free_bytes(self._device) >= 2 * sum(source.nbytes for source in sources)
        if not self._stages:
            return [], []
        try:
            return _joined(sources)
        except torch.OutOfMemoryError:  # training needs it: never again
            self._stages = False
            return [], []


def _joined(sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return copies of ``sources``, and the memory that they are in: one piece for each dtype."""
    copies: dict[int, torch.Tensor] = {}
    memory = []
    for dtype in dict.fromkeys(source.dtype for source in sources):
        numbers = [number for number, source in enumerate(sources) if source.dtype == dtype]
        flats = [sources[number].reshape(-1) for number in numbers]
        memory.append(torch.cat(flats))
        parts = memory[-1].split([flat.numel() for flat in flats])
        copies |= {n: part.view(sources[n].shape) for n, part in zip(numbers, parts, strict=True)}
    return [copies[number] for number in range(len(sources))], memory


def pinned(
    memory: memoryview, device: torch.device, use: str, advice: str = ""
) -> Callable[[], object] | None:
    """Pin ``memory``, so that ``device`` writes to it by itself. Returns what undoes that; None, with a warning, where
    the runtime refuses.

    Args:
        use: what the memory is for, in words.
        advice: what else the user can do.
    """
    try:
        return pin(memory, device)
    except CannotPin as refused:
        warnings.warn(
            f"{format_bytes(len(memory))} for {use} cannot be pinned ({refused.reason}), so training waits for its"
            f" copies. Raise the limit of locked memory (ulimit -l), or give less memory=.{advice}",
            stacklevel=6,
        )
        return None
