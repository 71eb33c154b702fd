"""Buffers: page-aligned memory for direct I/O, from one pool with a budget in bytes.

Sizes are bytes, rounded up to whole pages. A buffer is an anonymous private ``mmap`` of exactly its
size and is kept for the next ``take`` of that size, because a training step asks for the same few
sizes again and again. Idle buffers count towards the budget until the room is needed for another size:
what the pool holds is what the process holds.
"""

from __future__ import annotations

import mmap
import threading
from collections import defaultdict

from holdfast.errors import PoolExhausted
from holdfast.units import MiB, format_bytes, round_up

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
    """Hands out buffers of exact sizes and never holds more than ``budget_bytes`` (None: no limit).

    Safe to use from several threads. ``take`` never waits: what does not fit is an error, because the
    plan has counted every buffer beforehand.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.in_use_bytes = 0
        self.idle_bytes = 0
        self.peak_by_kind: dict[str, int] = defaultdict(int)
        """The most that was in use for each purpose at one time."""
        self._in_use_by_kind: dict[str, int] = defaultdict(int)
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
                self._make_room(size, kind)
                buffer = Buffer(size, kind)
            self._count(size, kind)
            self._in_use.add(id(buffer))
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Give ``buffer`` back. Nobody may read or write it afterwards, no transfer may be under way."""
        with self._lock:
            if id(buffer) not in self._in_use:
                raise ValueError(
                    f"a buffer of {buffer.nbytes} bytes for {buffer.kind!r} was given back that is not in use"
                )
            self._in_use.remove(id(buffer))
            self.in_use_bytes -= buffer.nbytes
            self._in_use_by_kind[buffer.kind] -= buffer.nbytes
            self._idle[buffer.nbytes].append(buffer)
            self.idle_bytes += buffer.nbytes

    def close(self) -> None:
        """Free the idle buffers. Those in use are freed when their holders let go of them."""
        with self._lock:
            self._free_idle(self.idle_bytes)

    def _count(self, size: int, kind: str) -> None:
        self.in_use_bytes += size
        self._in_use_by_kind[kind] += size
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self._in_use_by_kind[kind])

    def _make_room(self, size: int, kind: str) -> None:
        if self.budget_bytes is None:
            return
        if self.in_use_bytes + size > self.budget_bytes:
            raise PoolExhausted(
                f"a buffer of {format_bytes(size)} for {kind!r} does not fit:"
                f" {format_bytes(self.in_use_bytes)} of the budget of {format_bytes(self.budget_bytes)}"
                f" are in use ({self._uses()})."
                f" The smallest budget that holds it is {self.in_use_bytes + size} bytes."
            )
        self._free_idle(self.in_use_bytes + self.idle_bytes + size - self.budget_bytes)

    def _free_idle(self, nbytes: int) -> None:
        """Free idle buffers, the largest first, until ``nbytes`` are freed."""
        for size in sorted(self._idle, reverse=True):
            buffers = self._idle[size]
            while buffers and nbytes > 0:
                buffers.pop().free()
                self.idle_bytes -= size
                nbytes -= size
            if not buffers:
                del self._idle[size]

    def _uses(self) -> str:
        uses = sorted(self._in_use_by_kind.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {format_bytes(count)}" for kind, count in uses if count) or "nothing"
