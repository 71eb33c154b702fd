"""The operations of a training step, as data.

A schedule is a list of ``Op``. The same list is executed by the engine, timed by the simulator and counted against the
traffic formulas. An operation names what it waits for by key, in this step (``needs``) or in an earlier one
(``needs_previous``: the latest earlier step that had the key, nothing if none had). The list is in topological order.
Of the operations that are ready for a lane, those of the smallest ``priority`` go first, then those of the earlier
step, then the earlier in the list.

Computations run one after another, in list order: each needs the one before it. So sums are added in one order whatever
arrives first, and an operation that waits for a computation waits for all before it.

Exchanges between ranks also run one after another in list order, through one step and into the next. All ranks have the
same list, so none waits for an exchange that another will not make.

Bytes are exact. ``takes`` and ``gives`` name the operations between which each buffer lives, so memory is counted and
bounded from the same list (``step_builder``, ``memory_use``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

COMPUTE, SSD_READ, SSD_WRITE = "compute", "ssd_read", "ssd_write"
UPLOAD, DOWNLOAD = "upload", "download"  # host to device, device to host
UPDATE, COMMIT = "update", "commit"
EXCHANGE = "exchange"  # between ranks
LANES = (COMPUTE, SSD_READ, SSD_WRITE, UPLOAD, DOWNLOAD, UPDATE, COMMIT, EXCHANGE)
"""The resources that operations occupy. Lanes run side by side."""
NOW, SOON, LATER = 0, 1, 2
"""Priorities: a computation will wait for it; only an update waits for it; only a commit does."""
GUESS = "guess"
"""Phase of an update that may be made again."""
TIED = "tied"
"""Phase of what moves the parameters of an embedding, and their gradients, for a head that is tied to it."""


class Key(NamedTuple):
    """The name of one operation of a step. ``micro_batch`` is -1 for what happens once per block, or tile of it."""

    kind: str
    block: int = -1
    micro_batch: int = -1
    phase: str = ""
    tile: int = 0
    """The part of a unit's state that the operation is about."""


class Hold(NamedTuple):
    """A buffer of ``nbytes`` at ``place`` ("host" or "device").

    The first element of its name is its class: ``slots`` buffers of a class may be held at once, or any number if 0. A
    class lies at one place.
    """

    name: tuple
    nbytes: int
    place: str = "host"
    slots: int = 0

    @property
    def kind(self) -> str:
        """The class of the buffer."""
        return self.name[0]


class Op(NamedTuple):
    """One operation.

    ``nbytes`` is what it moves. ``work`` is what it computes: floating-point operations on the compute lane, elements
    on the update lane.
    """

    key: Key
    lane: str
    nbytes: int = 0
    work: float = 0.0
    needs: tuple[Key, ...] = ()
    needs_previous: tuple[Key, ...] = ()
    takes: tuple[Hold, ...] = ()
    gives: tuple[tuple, ...] = ()
    priority: int = NOW
    redo: bool = False
    """True for an operation that is done only where a guess was wrong (``StepShape.clipping``).

    Otherwise it is over as soon as its turn comes, moves nothing and takes no memory.
    """


def as_guessed(ops: Iterable[Op]) -> list[Op]:
    """Return the same step with every guess right: operations that would be made again take nothing."""
    return [op._replace(nbytes=0, work=0.0) if op.redo else op for op in ops]


def traffic(ops: Iterable[Op]) -> Counter[tuple[str, str]]:
    """Return the bytes moved, by (lane, kind of operation)."""
    moved: Counter[tuple[str, str]] = Counter()
    for op in ops:
        if op.nbytes:
            moved[op.lane, op.key.kind] += op.nbytes
    return moved


def lane_bytes(ops: Iterable[Op]) -> Counter[str]:
    """Return the bytes moved, by lane."""
    moved: Counter[str] = Counter()
    for op in ops:
        if op.nbytes:
            moved[op.lane] += op.nbytes
    return moved


def covered(intervals: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Return how much of the time from ``since`` to ``until`` lies in at least one of ``intervals`` (start, end).

    >>> covered([(0, 2), (1, 3), (5, 6), (8, 12)], 1, 10)
    5.0
    """
    total = 0.0
    for start, end in sorted(intervals):
        start, end = max(start, since), min(end, until)
        if end > start:
            total += end - start
            since = end
    return total
