"""Buffers: page-aligned memory for direct I/O, from one pool.

Sizes are bytes, rounded up to whole pages. A buffer is an anonymous private ``mmap`` of exactly its
size and is kept for the next ``take`` of that size, because a training step asks for the same few
sizes again and again. How many there are is bounded by the plan, which has counted them all beforehand.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter, defaultdict

from holdfast.units import MiB, round_up

HUGE_PAGE = 2 * MiB


class Buffer:
    """Page-aligned memory. ``view`` is writable, one byte per item; ``kind`` is what it is used for now."""

    __slots__ = ("_memory", "kind", "nbytes", "view")

    def __init__(self, nbytes: int, kind: str) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)

    def free(self) -> None:
        """Hand the memory back to the system, even if somebody still looks at it (and then sees zeros)."""
        try:
            self.view.release()
            self._memory.close()
        except BufferError:  # a tensor or a slice of the view is still alive; its pages can go all the same
            if hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED)


class BufferPool:
    """Hands out buffers of exact sizes. Safe to use from several threads; ``take`` never waits."""

    def __init__(self) -> None:
        self.in_use_bytes = 0
        self.idle_bytes = 0
        self.most_by_kind: dict[str, int] = {}
        """What was in use at once at most, by what for."""
        self._by_kind: Counter[str] = Counter()
        self._idle: dict[int, list[Buffer]] = defaultdict(list)
        self._in_use: set[int] = set()
        self._lock = threading.Lock()

    def take(self, nbytes: int, kind: str) -> Buffer:
        """A buffer of ``nbytes`` rounded up to whole pages. Its content is whatever was there before."""
        size = round_up(max(nbytes, 1))
        with self._lock:
            buffer = self._idle[size].pop() if self._idle.get(size) else None
            if buffer is not None:
                self.idle_bytes -= size
                buffer.kind = kind
            else:
                buffer = Buffer(size, kind)
            self.in_use_bytes += size
            self._by_kind[kind] += size
            self.most_by_kind[kind] = max(self.most_by_kind.get(kind, 0), self._by_kind[kind])
            self._in_use.add(id(buffer))
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Give ``buffer`` back. Nobody may read or write it afterwards, no transfer may be under way."""
        with self._lock:
            self._returned(buffer)
            self._idle[buffer.nbytes].append(buffer)
            self.idle_bytes += buffer.nbytes

    def drop(self, buffer: Buffer) -> None:
        """Give ``buffer`` back, and its memory to the system: the next to need it is not this pool."""
        with self._lock:
            self._returned(buffer)
        buffer.free()

    def _returned(self, buffer: Buffer) -> None:
        if id(buffer) not in self._in_use:
            raise ValueError(
                f"a buffer of {buffer.nbytes} bytes for {buffer.kind!r} was given back that is not in use"
            )
        self._in_use.remove(id(buffer))
        self.in_use_bytes -= buffer.nbytes
        self._by_kind[buffer.kind] -= buffer.nbytes

    def close(self) -> None:
        """Free the idle buffers. Those in use are freed when their holders let go of them."""
        with self._lock:
            for buffers in self._idle.values():
                for buffer in buffers:
                    buffer.free()
            self._idle.clear()
            self.idle_bytes = 0
