"""Staging buffers in memory that two processes share: one fills them, the other uses the content.

The memory is a file that is unlinked as soon as both processes have mapped it. So nothing is left of it when both have
ended, in whatever way. Sizes are bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ...accelerators import CannotPin, pin
from ...io.threads import open_file
from ...store.disk import Disk
from ...store.format.file_names import Layout
from ..capture.staging_buffers import StagingBuffer, StagingPool

RING = "ring"

ADVICE = " {place} has to be on a tmpfs, as /dev/shm is: memory of files elsewhere is refused."
"""Advice where the shared memory cannot be pinned."""


class SharedPool(StagingPool):
    """A pool of ``count`` staging buffers in the new file ``ring`` of a shared-memory store.

    Every page is faulted in. Pinned where gradients come from ``devices``.
    """

    def __init__(
        self, place: Path, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device] = ()
    ) -> None:
        super().__init__(layouts, 0, devices)
        self.part_bytes = [layout.file_bytes for layout in layouts]
        disk = Disk(place)
        disk.allocate(
            RING, max(1, count * self.slot_bytes)
        )  # otherwise a write without free space would end the process
        self._ring = Ring(place, self.part_bytes, count)
        self.slots = [
            StagingBuffer(layouts, self._ring.parts(number), self._departures, ADVICE.format(place=place))
            for number in range(count)
        ]
        self._free = list(self.slots)

    def close(self) -> None:
        super().close()
        self._ring.close()


class Ring:
    """The shared memory of ``count`` staging buffers, each with parts of ``part_bytes``."""

    def __init__(self, place: Path, part_bytes: Sequence[int], count: int) -> None:
        self._part_bytes = list(part_bytes)
        nbytes = max(1, count * sum(part_bytes))
        with open_file(place / RING, write=True, direct=False) as file:
            self._memory = mmap.mmap(file.fd, nbytes)
        self._view = memoryview(self._memory)
        self._unpin: Callable[[], object] | None = None

    def parts(self, slot: int) -> list[memoryview]:
        start, parts = slot * sum(self._part_bytes), []
        for nbytes in self._part_bytes:
            parts.append(self._view[start : start + nbytes])
            start += nbytes
        return parts

    def pin(self, device: torch.device) -> None:
        """Pin the memory, so that copies from it to ``device`` are fast. Where that is refused they are slow."""
        with suppress(CannotPin):
            self._unpin = pin(self._view, device)

    def close(self) -> None:
        """Release the memory; buffers that still refer to it keep it alive."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        with suppress(BufferError):
            self._view.release()
            self._memory.close()
