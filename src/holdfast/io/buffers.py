"""Buffers: page-aligned memory for direct I/O, from one pool.

Sizes are bytes, rounded up to whole pages. A buffer is an anonymous private ``mmap`` of exactly its
size and is kept for the next ``take`` of that size, because a training step asks for the same few
sizes again and again. How many there are is bounded by the plan, which has counted them all beforehand.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection

from holdfast.units import MiB, round_up

HUGE_PAGE = 2 * MiB


class Buffer:
    """Page-aligned memory. ``view`` is writable, one byte per item; ``kind`` is what it is used for now."""

    __slots__ = ("_memory", "kind", "nbytes", "unpin", "view")

    def __init__(self, nbytes: int, kind: str) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.unpin: Callable[[], object] | None = None

    def keep_from_forks(self, kept: bool = True) -> None:
        """Leave the memory out of processes that fork from this one, or no longer do.

        A device copies from and to pages, not addresses: a fork that shares them makes the system give others to who
        writes next, or copy all of them for every worker of a loader.
        """
        advice = getattr(mmap, "MADV_DONTFORK" if kept else "MADV_DOFORK", None)
        if advice is not None:
            self._memory.madvise(advice)

    def free(self) -> None:
        """Hand the memory back to the system, even if somebody still looks at it (and then sees zeros)."""
        try:
            self.view.release()
            self._memory.close()
        except BufferError:  # a tensor or a slice of the view is still alive; its pages can go all the same
            if hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED)


EIGHTHS = 8
"""Sizes that ``classed`` knows of between a power of two and the next."""


def classed(nbytes: int) -> int:
    """Return the next of eight sizes between powers of two that has room for ``nbytes``: at most an eighth more.

    >>> classed(1000), classed(1025), classed(9)
    (1024, 1152, 9)
    """
    step = max(1, (1 << max(nbytes - 1, 0).bit_length()) // 2 // EIGHTHS)
    return round_up(nbytes, step)


class BufferPool:
    """Hands out buffers of exact sizes. Safe to use from several threads; ``take`` never waits."""

    def __init__(
        self,
        pin: Callable[[memoryview], Callable[[], object] | None] | None = None,
        pinned_kinds: Collection[str] = (),
        pinned_limit: int | None = None,
    ) -> None:
        """Memory for ``pinned_kinds`` is pinned by ``pin``, once, until what that returns is called; None says that it
        could not be. Idle pinned buffers go back to the system where a new one would make more than ``pinned_limit``
        bytes."""
        self.pinned_limit = pinned_limit
        self.pins = pin is not None
        self._pin, self._pinned_kinds = pin, frozenset(pinned_kinds if pin else ())
        self._pinned: list[Buffer] = []
        self.pinned_bytes = 0
        self.in_use_bytes = 0
        self.idle_bytes = 0
        self.most_by_kind: dict[str, int] = {}
        """What was in use at once at most, by what for."""
        self._by_kind: Counter[str] = Counter()
        self._idle: dict[tuple[bool, int], list[Buffer]] = defaultdict(list)
        """By whether they are for ``pinned_kinds``, and their size."""
        self._in_use: set[int] = set()
        self._lock = threading.Lock()

    def take(self, nbytes: int, kind: str) -> Buffer:
        """A buffer of ``nbytes`` rounded up to whole pages. Its content is whatever was there before."""
        size, pinned = round_up(max(nbytes, 1)), kind in self._pinned_kinds
        with self._lock:
            idle = self._idle.get((pinned, size))
            buffer = idle.pop() if idle else None
            if buffer is not None:
                self.idle_bytes -= size
                buffer.kind = kind
            else:
                buffer = Buffer(size, kind)
                if pinned:
                    self._make_room(size)
                    self._pin_it(buffer)
            self.in_use_bytes += size
            self._by_kind[kind] += size
            self.most_by_kind[kind] = max(self.most_by_kind.get(kind, 0), self._by_kind[kind])
            self._in_use.add(id(buffer))
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Give ``buffer`` back. Nobody may read or write it afterwards, no transfer may be under way."""
        with self._lock:
            self._returned(buffer)
            self._idle[buffer.kind in self._pinned_kinds, buffer.nbytes].append(buffer)
            self.idle_bytes += buffer.nbytes

    def drop(self, buffer: Buffer) -> None:
        """Give ``buffer`` back, and its memory to the system: the next to need it is not this pool."""
        with self._lock:
            self._returned(buffer)
            self._unpin_it(buffer)
        buffer.free()

    def _make_room(self, nbytes: int) -> None:
        """Free idle pinned buffers, those that were idle longest first of each size, until ``nbytes`` fit below the
        limit or none is left."""
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
            self.pinned_bytes += buffer.nbytes

    def _unpin_it(self, buffer: Buffer) -> None:
        if buffer.unpin is not None:
            buffer.unpin()
            buffer.keep_from_forks(False)
            self._pinned.remove(buffer)
            self.pinned_bytes -= buffer.nbytes

    def _returned(self, buffer: Buffer) -> None:
        if id(buffer) not in self._in_use:
            raise ValueError(
                f"a buffer of {buffer.nbytes} bytes for {buffer.kind!r} was given back that is not in use"
            )
        self._in_use.remove(id(buffer))
        self.in_use_bytes -= buffer.nbytes
        self._by_kind[buffer.kind] -= buffer.nbytes

    def close(self) -> None:
        """Free the idle buffers. Those in use are freed when their holders let go of them; nothing is pinned any more,
        so no transfer of a device may be under way."""
        with self._lock:
            for buffer in list(self._pinned):
                self._unpin_it(buffer)
        self.free_idle()

    def free_idle(self) -> None:
        """Hand the memory of idle buffers back to the system: what comes next takes other sizes."""
        with self._lock:
            for buffer in (buffer for buffers in self._idle.values() for buffer in buffers):
                if buffer in self._pinned:
                    self._unpin_it(buffer)
                buffer.free()
            self._idle.clear()
            self.idle_bytes = 0
