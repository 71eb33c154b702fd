"""Staging buffers: host memory into which gradients are copied, from a device while training continues.

Every page is faulted in once. One buffer holds what one iteration consumes, and is owned by the recorder until it is
written. For each optimizer it has a *part*: the bytes of a safetensors file with the encoded gradients of all its
trained parameters, in whole pages. All buffers have one layout, so that each is allocated once. Sizes are bytes.

Copies from a device go into pinned memory. The writing thread waits for their end, not the training thread.

1. The training stream copies gradients on the device, so that an optimizer may overwrite them. That takes a hundredth
   of the time of the bus.
2. A second stream brings the copy to the host, while the device trains on.
3. The writing thread (``recorder``, ``RecordSender``) waits for the event behind that copy. It selects the device
   first, because a new thread has device 0 and would make a context there.

Where the device has no room for step 1, gradients are copied on the training stream, which stops for that time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...accelerators import (
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
from ...io.buffers import Buffer
from ...quantities import PAGE, format_bytes
from ...state.plain_tensors import FROM_NAME
from ...store.format.payload_layout import Layout

MIN_BUFFERS = 2
"""The number of buffers that a pool needs: one is written while another is filled."""


class StagingBuffer:
    """A staging buffer for one iteration.

    ``parts`` holds its memory by optimizer. ``tensors`` holds the views of each part by parameter name, or by key where
    a codec has other arrays.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        parts: Sequence[memoryview] | None = None,
        departures: DeviceCopies | None = None,
        advice: str = "",
    ) -> None:
        """Allocate the buffer, or use ``parts``, which the caller frees. Pinned where there are ``departures``.

        ``advice`` completes the warning where pinning fails.
        """
        self.layouts = layouts
        self._memory = [Buffer(layout.file_bytes, "records") for layout in layouts if parts is None]
        self.parts = [buffer.view for buffer in self._memory] if parts is None else list(parts)
        self.tensors = [
            _views(view, layout, "/grad") for view, layout in zip(self.parts, layouts, strict=True)
        ]
        for view, layout in zip(self.parts, layouts, strict=True):
            np.frombuffer(view, np.uint8)[::PAGE] = 0  # fault every page in
            view[: len(layout.header)] = layout.header
        self._departures, self._marks = departures, list[Any]()
        found = [
            pinned(view, device, "records", advice)
            for device in (departures.devices[:1] if departures is not None else ())
            for view in self.parts
            if len(view)
        ]
        self._unpins = [unpin for unpin in found if unpin is not None]
        self._is_pinned = bool(found) and len(self._unpins) == len(found)

    @property
    def is_late(self) -> bool:
        """Return whether any copy into the buffer may be under way."""
        return bool(self._marks)

    @torch.no_grad()
    def put(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], lasting: bool = False
    ) -> None:
        """Copy ``sources`` into ``targets``, views of this buffer. ``wait_for_copies`` waits for copies under way.

        Args:
            lasting: True if nobody writes to the sources any more, and nobody else holds them.
        """
        if not targets:
            return
        if self._departures is None or not self._is_pinned:
            torch._foreach_copy_(list(targets), list(sources))
        else:
            self._marks += self._departures.send(targets, sources, lasting)

    def wait_for_copies(self) -> None:
        """Return when all copies have arrived."""
        for mark in self._marks:
            mark.synchronize()
        self._marks.clear()

    def free(self) -> None:
        self.wait_for_copies()
        for unpin in self._unpins:
            unpin()
        self._unpins.clear()
        self.tensors.clear()
        self.parts.clear()
        for buffer in self._memory:
            buffer.free()


class StagingPool:
    """A pool of ``count`` staging buffers, for gradients on ``devices``. One thread takes, another gives back.

    A buffer in host memory is made when it is first needed. So a resume does not wait for the memory of all, and a run
    without records takes none. Pinned buffers are made at once, because pinning one stops the device.
    """

    def __init__(self, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device] = ()) -> None:
        self.devices, self.count = list(devices), count
        self.slot_bytes = sum(layout.file_bytes for layout in layouts)
        self._layouts = list(layouts)
        self._departures = DeviceCopies(devices) if devices else None
        self.slots: list[StagingBuffer] = []
        """The buffers that have been made."""
        self._free: list[StagingBuffer] = []
        self._changed = threading.Condition()
        while devices and len(self.slots) < count:
            self._make()

    def _make(self) -> None:
        """Make one more buffer, which is free."""
        self.slots.append(StagingBuffer(self._layouts, departures=self._departures))
        self._free.append(self.slots[-1])

    def _make_or_stop_growing(self) -> None:
        """Make one more buffer. Where the system has no memory for it, those that were made are all there will be."""
        try:
            self._make()
        except (OSError, MemoryError) as error:
            if len(self.slots) < MIN_BUFFERS:
                raise
            self.count = len(self.slots)
            warnings.warn(
                f"there is no memory for more than {self.count} records on their way to the disk, of"
                f" {format_bytes(self.slot_bytes)} each ({error}), so training waits for the disk sooner. Give less"
                " memory= to have it so from the beginning.",
                stacklevel=7,
            )

    def serves(self, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device]) -> bool:
        """Return whether a new pool would be like this one, and all buffers are free."""
        with self._changed:
            is_idle = len(self.slots) == len(self._free)
        return is_idle and (self._layouts, self.count, self.devices) == (list(layouts), count, list(devices))

    def take(self, timeout: float = 0.0) -> StagingBuffer | None:
        """Return a free staging buffer; None if none becomes free within ``timeout`` seconds."""
        with self._changed:
            if not self._free and len(self.slots) < self.count:
                self._make_or_stop_growing()
            if not self._free and timeout > 0:
                self._changed.wait_for(lambda: bool(self._free), timeout)
            slot = self._free.pop() if self._free else None
        if slot is not None:
            slot.wait_for_copies()  # a buffer given back without a record may have copies under way
        return slot

    def give(self, slots: Sequence[StagingBuffer]) -> None:
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def close(self) -> None:
        """Free all memory. Called while nothing is under way."""
        for slot in self.slots:
            slot.free()


def tensors_of(part: memoryview, suffix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors in a part, by their keys without ``suffix``."""
    return _views(part, Layout.parse(part), suffix)


def _views(view: memoryview, layout: Layout, suffix: str) -> dict[str, torch.Tensor]:
    return {
        entry.key.removesuffix(suffix): torch.frombuffer(
            view[entry.offset : entry.end], dtype=FROM_NAME[entry.dtype]
        ).view(entry.shape)
        if entry.nbytes
        else torch.empty(entry.shape, dtype=FROM_NAME[entry.dtype], device="cpu")
        for entry in layout.entries
    }


class AsyncHostCopy:
    """Asynchronous copies of ``tensors`` to the host."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copies = {key: copied(tensor) for key, tensor in tensors.items()}
        self._marks = marks(devices_of(tensors.values()))

    def arrived(self) -> dict[str, torch.Tensor]:
        """Wait for the copies and return them."""
        for mark in self._marks:
            mark.synchronize()
        return self._copies


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, in torch's pinned memory, that may still be under way."""
    return tensor.detach().to("cpu", non_blocking=True, copy=True)


class DeviceCopies:
    """Starter of copies from ``devices`` to pinned memory. Called by the training thread."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._of = {device: _Departure(device) for device in devices}

    @property
    def devices(self) -> list[torch.device]:
        return list(self._of)

    @torch.no_grad()
    def send(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], lasting: bool = False
    ) -> list[Any]:
        """Begin to copy ``sources`` into ``targets``, and return the events of their end. Sources on the host are
        copied at once.

        Args:
            lasting: True if nobody writes to the sources any more, and nobody else holds them.
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
    """Starter of copies from one ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = new_stream(device)
        self._stages: bool | None = None
        """True if the device has room for a copy of the sources; None before the first."""

    def send(self, targets: list[torch.Tensor], sources: list[torch.Tensor], lasting: bool) -> Any:
        """Begin to copy ``sources`` into ``targets``, and return the event of the end."""
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
        """Return copies of ``sources`` on the device, and the memory that holds them; both empty where there is no
        room.
        """
        if self._stages is None:
            self._stages = free_bytes(self._device) >= 2 * sum(source.nbytes for source in sources)
        if not self._stages:
            return [], []
        try:
            return _joined(sources)
        except torch.OutOfMemoryError:  # training needs the memory: never try again
            self._stages = False
            return [], []


def _joined(sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return copies of ``sources``, and the memory that holds them: one tensor for each dtype."""
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
    """Pin ``memory``, so that ``device`` can write to it directly, and return a function that unpins it.

    Returns None, with a warning, where the runtime refuses.

    Args:
        use: The purpose of the memory, for the warning.
        advice: Further advice for the user.
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
