"""Ring: slots in memory that two processes share. One fills them, the other uses what is in them.

Sizes are bytes. The memory is a file that has no name any more as soon as both have it, so nothing is left of it when
both have ended, however they did.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ..io.threads import open_file
from ..store.files import Disk
from ..store.layout import Layout
from .slots import Slot, SlotPool

RING = "ring"

ADVICE = " {place} has to be on a tmpfs, as /dev/shm is: memory of files elsewhere is refused."
"""For who cannot have a ring pinned."""


class SharedPool(SlotPool):
    """``count`` slots in the file ``ring`` of a tier, which is made and whose every page is faulted in; pinned, where
    gradients come from ``devices``."""

    def __init__(
        self, place: Path, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device] = ()
    ) -> None:
        super().__init__(layouts, 0, devices)
        self.part_bytes = [layout.file_bytes for layout in layouts]
        disk = Disk(place)
        disk.allocate(
            RING, max(1, count * self.slot_bytes)
        )  # or a write would end the process for want of space
        self._ring = Ring(place, self.part_bytes, count)
        self.slots = [
            Slot(layouts, self._ring.parts(number), self._departures, ADVICE.format(place=place))
            for number in range(count)
        ]
        self._free = list(self.slots)

    def close(self) -> None:
        super().close()
        self._ring.close()


class Ring:
    """The memory of ``count`` slots, each with parts of ``part_bytes``."""

    def __init__(self, place: Path, part_bytes: Sequence[int], count: int) -> None:
        self._part_bytes = list(part_bytes)
        nbytes = max(1, count * sum(part_bytes))
        with open_file(place / RING, write=True, direct=False) as file:
            self._memory = mmap.mmap(file.fd, nbytes)
        self._view = memoryview(self._memory)

    def parts(self, slot: int) -> list[memoryview]:
        start, parts = slot * sum(self._part_bytes), []
        for nbytes in self._part_bytes:
            parts.append(self._view[start : start + nbytes])
            start += nbytes
        return parts

    def close(self) -> None:
        """Let go of the memory; what still looks at it keeps it."""
        with suppress(BufferError):
            self._view.release()
            self._memory.close()
