"""Slots: memory that gradients are copied into, faulted in once and owned by the recorder until it is written.

Sizes are bytes. One slot holds what one iteration consumes: for each optimizer a *part*, the image of a safetensors
file with what the codec makes of the gradients of all its trained parameters, in whole pages. All slots have one
layout, so that no memory is taken while training runs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from ..io.buffers import Buffer
from ..state.dtypes import FROM_NAME
from ..store.layout import Layout
from ..units import PAGE
from .leaving import marks, pin, unpin


class Slot:
    """Room for one iteration: ``parts`` by optimizer, ``tensors`` the views of each by parameter name (by key, where a
    codec has other arrays)."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        parts: Sequence[memoryview] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """In memory of its own, or in ``parts``, which somebody else frees. Copies from CUDA ``devices`` may be under
        way when what began them returns."""
        self.layouts = layouts
        self._memory = [Buffer(layout.file_bytes, "records") for layout in layouts if parts is None]
        self.parts = [buffer.view for buffer in self._memory] if parts is None else list(parts)
        self.tensors = [
            _views(view, layout, "/grad") for view, layout in zip(self.parts, layouts, strict=True)
        ]
        for view, layout in zip(self.parts, layouts, strict=True):
            np.frombuffer(view, np.uint8)[::PAGE] = 0  # fault every page in
            view[: len(layout.header)] = layout.header
        self._devices, self._marks = devices, []
        self._pinned = [view for view in self.parts if devices and len(view) and pin(view)]

    @property
    def non_blocking(self) -> bool:
        """Whether copies into the slot are not waited for where they are begun."""
        return bool(self._pinned)

    @property
    def is_late(self) -> bool:
        """Whether anything may be under way."""
        return bool(self._marks)

    def begun(self) -> None:
        """Copies were begun, for which ``settle`` waits."""
        self._marks += marks(self._devices)

    def settle(self) -> None:
        """Return when everything has arrived."""
        for mark in self._marks:
            mark.synchronize()
        self._marks.clear()

    def free(self) -> None:
        self.settle()
        for view in self._pinned:
            unpin(view)
        self._pinned.clear()
        self.tensors.clear()
        self.parts.clear()
        for buffer in self._memory:
            buffer.free()


class SlotPool:
    """``count`` slots. One thread takes, another gives back."""

    def __init__(self, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device] = ()) -> None:
        self.slots = [Slot(layouts, devices=devices) for _ in range(count)]
        self.slot_bytes = sum(layout.file_bytes for layout in layouts)
        self._free = list(self.slots)
        self._changed = threading.Condition()

    def take(self, timeout: float = 0.0) -> Slot | None:
        """A free slot; None if there is none within ``timeout`` seconds."""
        with self._changed:
            if not self._free and timeout > 0:
                self._changed.wait_for(lambda: bool(self._free), timeout)
            return self._free.pop() if self._free else None

    def give(self, slots: Sequence[Slot]) -> None:
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def close(self) -> None:
        """Free all memory. Nothing may be under way."""
        for slot in self.slots:
            slot.free()


def tensors_of(part: memoryview, suffix: str = "") -> dict[str, torch.Tensor]:
    """The tensors in a part, by their keys without ``suffix``."""
    return _views(part, Layout.parse(part), suffix)


def _views(view: memoryview, layout: Layout, suffix: str) -> dict[str, torch.Tensor]:
    return {
        entry.key.removesuffix(suffix): torch.frombuffer(
            view[entry.offset : entry.end], dtype=FROM_NAME[entry.dtype]
        ).view(entry.shape)
        if entry.nbytes
        else torch.empty(entry.shape, dtype=FROM_NAME[entry.dtype])
        for entry in layout.entries
    }
