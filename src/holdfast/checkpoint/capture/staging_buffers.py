"""Staging buffers: host memory into which gradients are copied, owned by the recorder until it is written.

Every page is faulted in once. One buffer holds what one iteration consumes. For each optimizer it has a *part*: the
bytes of a safetensors file with the encoded gradients of all its trained parameters, in whole pages. All buffers have
one layout, so that no memory is allocated during training. Sizes are bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...io.buffers import Buffer
from ...quantities import PAGE
from ...state.plain_tensors import FROM_NAME
from ...store.format.file_names import Layout
from .async_copy import DeviceCopies, pinned


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
    """A pool of ``count`` staging buffers, for gradients on ``devices``. One thread takes, another gives back."""

    def __init__(self, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device] = ()) -> None:
        self.devices = list(devices)
        self._departures = DeviceCopies(devices) if devices else None
        self.slots = [StagingBuffer(layouts, departures=self._departures) for _ in range(count)]
        self.slot_bytes = sum(layout.file_bytes for layout in layouts)
        self._free = list(self.slots)
        self._changed = threading.Condition()

    def serves(self, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device]) -> bool:
        """Return whether a new pool would be like this one, and all buffers are free."""
        with self._changed:
            alike = len(self.slots) == count == len(self._free) and self.devices == list(devices)
        return alike and all(list(slot.layouts) == list(layouts) for slot in self.slots)

    def take(self, timeout: float = 0.0) -> StagingBuffer | None:
        """Return a free staging buffer; None if none becomes free within ``timeout`` seconds."""
        with self._changed:
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
