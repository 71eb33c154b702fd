"""Page-aligned memory for direct I/O, from one pool.

A buffer is an anonymous private ``mmap``. It is kept for the next ``take`` of its size, because a training step asks
for the same few sizes again and again. It also serves a ``take`` of the same kind and nearly its size, because tiles of
one block differ by a few rows. The plan has counted the buffers of each kind beforehand, whatever their sizes. So of a
kind no more memory is kept than was once in use: idle buffers of other sizes are freed. Sizes are bytes, rounded up to
whole pages.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection

from holdfast.quantities import MiB, round_up

HUGE_PAGE = 2 * MiB


class Buffer:
    """Page-aligned memory. ``view`` is writable, one byte per item; ``kind`` is its current use.

    ``nbytes`` of its ``memory_bytes`` are in use, and in ``view``.
    """

    __slots__ = ("_memory", "kind", "memory_bytes", "nbytes", "unpin", "view")

    def __init__(self, nbytes: int, kind: str) -> None:
        self.nbytes = self.memory_bytes = nbytes
        self.kind = kind
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.unpin: Callable[[], object] | None = None

    def use(self, nbytes: int, kind: str) -> None:
        """Begin another use, of at most ``memory_bytes``."""
        self.kind = kind
        if nbytes != self.nbytes:
            self.nbytes, self.view = nbytes, memoryview(self._memory)[:nbytes]

    def keep_from_forks(self, kept: bool = True) -> None:
        """Exclude the memory from processes that fork from this one, or include it again.

        A device copies from and to pages, not addresses. If a fork shared them, the next write would move this
        process to other pages, or copy all of them for every worker of a loader.
        """
        advice = getattr(mmap, "MADV_DONTFORK" if kept else "MADV_DOFORK", None)
        if advice is not None:
            self._memory.madvise(advice)

    def free(self) -> None:
        """Return the memory to the system, even if somebody still holds a view of it (which then shows zeros)."""
        try:
            self.view.release()
            self._memory.close()
        except BufferError:  # a tensor or a slice of the view is still alive, but its pages can go
            if hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED)


NEARLY = 16
"""A buffer serves a use of the same kind that is at most one part in this many smaller."""
EIGHTHS = 8
"""The number of sizes that ``classed`` knows between a power of two and the next."""


def classed(nbytes: int) -> int:
    """Return the next of eight sizes between powers of two that holds ``nbytes``, at most an eighth more.

    >>> classed(1000), classed(1025), classed(9)
    (1024, 1152, 9)
    """
    step = max(1, (1 << max(nbytes - 1, 0).bit_length()) // 2 // EIGHTHS)
    return round_up(nbytes, step)


class BufferPool:
    """A pool of buffers. Safe to use from several threads; ``take`` never waits."""

    def __init__(
        self,
        pin: Callable[[memoryview], Callable[[], object] | None] | None = None,
        pinned_kinds: Collection[str] = (),
        pinned_limit: int | None = None,
    ) -> None:
        """Prepare an empty pool.

        Args:
            pin: Pins memory and returns a function that unpins it, or None if the memory could not be pinned.
            pinned_kinds: The kinds whose memory is pinned, once, when it is made.
            pinned_limit: The most pinned bytes; idle pinned buffers are freed before a new one would exceed it.
        """
        self.pinned_limit = pinned_limit
        self.pins = pin is not None
        self._pin, self._pinned_kinds = pin, frozenset(pinned_kinds if pin else ())
        self._pinned: list[Buffer] = []
        self.pinned_bytes = 0
        self.in_use_bytes = 0
        self.idle_bytes = 0
        self.most_by_kind: dict[str, int] = {}
        """The most bytes that were in use at once, by kind."""
        self._by_kind: Counter[str] = Counter()
        self._idle: dict[tuple[bool, int], list[Buffer]] = defaultdict(list)
        """The idle buffers, by whether they are for ``pinned_kinds`` and by size."""
        self._in_use: set[int] = set()
        self._lock = threading.Lock()

    def take(self, nbytes: int, kind: str) -> Buffer:
        """Return a buffer of ``nbytes`` rounded up to whole pages. Its content is undefined."""
        size, pinned = round_up(max(nbytes, 1)), kind in self._pinned_kinds
        with self._lock:
            buffer = self._idle_for(size, kind, pinned)
            if buffer is not None:
                self.idle_bytes -= buffer.memory_bytes
                buffer.use(size, kind)
            else:
                buffer = Buffer(size, kind)
                if pinned:
                    self._make_room(size)
                    self._pin_it(buffer)
            self.in_use_bytes += size
            self._by_kind[kind] += size
            self.most_by_kind[kind] = max(self.most_by_kind.get(kind, 0), self._by_kind[kind])
            self._in_use.add(id(buffer))
            if not pinned:
                self._free_surplus(kind)
            return buffer

    def _idle_for(self, size: int, kind: str, pinned: bool) -> Buffer | None:
        """Remove and return an idle buffer that may serve; of this ``kind`` if there is one.

        One of the same kind may be hardly larger than ``size``; one of another kind has that size.
        """
        exact = self._idle.get((pinned, size), [])
        near = [
            idle
            for (other, memory_bytes), idle in self._idle.items()
            if other == pinned and size < memory_bytes <= size + size // NEARLY
        ]
        for idle in (exact, *near):
            for place in reversed(range(len(idle))):
                if idle[place].kind == kind:
                    return idle.pop(place)
        return exact.pop() if exact else None

    def _free_surplus(self, kind: str) -> None:
        """Free idle buffers of ``kind``, while more of its memory is held than was once in use."""
        found = [
            (idle, buffer)
            for (pinned, _), idle in self._idle.items()
            for buffer in idle
            if buffer.kind == kind and not pinned
        ]
        surplus = self._by_kind[kind] + sum(b.memory_bytes for _, b in found) - self.most_by_kind[kind]
        for idle, buffer in found:
            if surplus <= 0:
                return
            idle.remove(buffer)
            surplus -= buffer.memory_bytes
            self.idle_bytes -= buffer.memory_bytes
            buffer.free()

    def give(self, buffer: Buffer) -> None:
        """Give ``buffer`` back for reuse.

        Nobody may read or write it afterwards, and no transfer may be under way.
        """
        with self._lock:
            self._returned(buffer)
            self._idle[buffer.kind in self._pinned_kinds, buffer.memory_bytes].append(buffer)
            self.idle_bytes += buffer.memory_bytes

    def drop(self, buffer: Buffer) -> None:
        """Give ``buffer`` back and return its memory to the system, because this pool will not need it."""
        with self._lock:
            self._returned(buffer)
            self._unpin_it(buffer)
        buffer.free()

    def _make_room(self, nbytes: int) -> None:
        """Free idle pinned buffers until ``nbytes`` fit below the limit or none is left.

        Of each size, the buffers that were idle longest go first.
        """
        if self.pinned_limit is None:
            return
        for (pinned, size), idle in self._idle.items():
            while pinned and idle and self.pinned_bytes + nbytes > self.pinned_limit:
                buffer = idle.pop(0)
                self.idle_bytes -= size
                self._unpin_it(buffer)
                buffer.free()

    def _pin_it(self, buffer: Buffer) -> None:
        assert self._pin is not None
        buffer.unpin = self._pin(buffer.view)
        if buffer.unpin is not None:
            buffer.keep_from_forks()
            self._pinned.append(buffer)
            self.pinned_bytes += buffer.memory_bytes

    def _unpin_it(self, buffer: Buffer) -> None:
        if buffer.unpin is not None:
            buffer.unpin()
            buffer.keep_from_forks(False)
            self._pinned.remove(buffer)
            self.pinned_bytes -= buffer.memory_bytes

    def _returned(self, buffer: Buffer) -> None:
        if id(buffer) not in self._in_use:
            raise ValueError(
                f"a buffer of {buffer.nbytes} bytes for {buffer.kind!r} was given back that is not in use"
            )
        self._in_use.remove(id(buffer))
        self.in_use_bytes -= buffer.nbytes
        self._by_kind[buffer.kind] -= buffer.nbytes

    def close(self) -> None:
        """Free the idle buffers and unpin all others, which are freed when their holders release them.

        No transfer of a device may be under way.
        """
        with self._lock:
            for buffer in list(self._pinned):
                self._unpin_it(buffer)
        self.free_idle()

    def free_idle(self, kind: str | None = None) -> None:
        """Return the memory of idle buffers to the system, because other sizes or other uses come next.

        Of one ``kind`` if it is given, else of all.
        """
        with self._lock:
            for idle in self._idle.values():
                for buffer in [each for each in idle if kind in (None, each.kind)]:
                    idle.remove(buffer)
                    self.idle_bytes -= buffer.memory_bytes
                    if buffer in self._pinned:
                        self._unpin_it(buffer)
                    buffer.free()
            if kind is None:
                self._idle.clear()
