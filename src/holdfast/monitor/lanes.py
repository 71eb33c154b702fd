"""The lanes of one step: when each was busy, and which of them the step waited for. Seconds from its beginning.

Lanes run side by side. The bottleneck is the lane that is busy longest: no order of the same operations is faster. A
transfer counts from its request, so a lane is busy while any of its operations is under way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..schedule.operations import (
    COMMIT,
    COMPUTE,
    DOWNLOAD,
    EXCHANGE,
    SSD_READ,
    SSD_WRITE,
    UPDATE,
    UPLOAD,
    covered,
)

NAMES = {
    COMPUTE: "computing", SSD_READ: "SSD reads", SSD_WRITE: "SSD writes", UPLOAD: "copies to the device",
    DOWNLOAD: "copies from the device", UPDATE: "the optimizer", COMMIT: "commits",
    EXCHANGE: "the exchange between ranks",
}  # fmt: skip
"""Names of the lanes in texts."""
SSD = "the SSD, reads and writes together"
BUSY, MOST = 0.9, 0.6
"""Shares of a step above which a lane is called the bottleneck, or the busiest."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; ``step`` is the number of its step."""

    lane: str
    kind: str
    start: float
    end: float
    step: int
    phase: str
    block: int
    micro_batch: int
    nbytes: int

    @property
    def label(self) -> str:
        """A description of the operation for texts."""
        words = [self.kind.replace("_", " ")]
        words += [self.phase] if self.phase and self.phase != self.kind else []
        words += [f"block {self.block}"] if self.block >= 0 else []
        words += [f"micro-batch {self.micro_batch}"] if self.micro_batch >= 0 else []
        return ", ".join(words)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Everything that ran from the beginning of ``step`` on: its operations, and those beside them."""

    step: int
    of_sitting: int
    """The number of the step within its sitting, from 1."""
    began: float
    """The beginning of the step, in unix seconds."""
    seconds: float
    """Seconds from its beginning until ``step()`` returned."""
    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, event: dict[str, Any]) -> Timeline:
        lanes, kinds = event["lanes"], event["kinds"]
        return cls(
            step=event["step"] + 0,
            of_sitting=event["of_sitting"] + 0,
            began=event["began"] + 0.0,
            seconds=event["seconds"] + 0.0,
            operations=tuple(
                Operation(lanes[lane], kinds[kind], *rest) for lane, kind, *rest in event["spans"]
            ),
        )

    @property
    def is_first(self) -> bool:
        """True for the first step of a sitting, which has no work of an earlier step beside it."""
        return self.of_sitting == 1

    @cached_property
    def end(self) -> float:
        """The time at which the whole step was over."""
        return max([self.seconds, *(op.end for op in self.operations if op.step == self.step)])

    @property
    def window(self) -> float:
        """The length of the time window from 0 on that is examined; for a first step, until all of it was over."""
        return self.end if self.is_first else self.seconds

    @cached_property
    def busy(self) -> dict[str, float]:
        """The seconds in the window for which each lane that did anything was busy."""
        return {lane: self._covered(found) for lane, found in self.by_lane().items()}

    def _covered(self, operations: Iterable[Operation]) -> float:
        return covered(((op.start, op.end) for op in operations), 0.0, self.window)

    def by_lane(self) -> dict[str, list[Operation]]:
        """Return operations by lane, in the order of ``NAMES``."""
        found: dict[str, list[Operation]] = {}
        for lane in NAMES:
            if mine := sorted((op for op in self.operations if op.lane == lane), key=lambda op: op.start):
                found[lane] = mine
        return found

    @cached_property
    def waits(self) -> dict[str, float]:
        """The seconds that compute stood still, by the lane that it waited for.

        That is the lane of the operation that ended last before compute continued, for as long as it ran; then of the
        one that ended last before that. "" holds the time in between.
        """
        lanes = self.by_lane()
        computed = lanes.pop(COMPUTE, [])
        others = sorted((op for found in lanes.values() for op in found), key=lambda op: op.end)
        ends = [op.end for op in others]
        waited: dict[str, float] = defaultdict(float)
        idle_since = 0.0
        for op in computed:
            at, place = min(op.start, self.window), len(ends)
            while at > idle_since:  # goes back from the end of the gap, by the operations that ended last
                place = min(bisect_right(ends, at), place) - 1
                if place < 0 or ends[place] <= idle_since:
                    waited[""] += at - idle_since
                    break
                start = max(others[place].start, idle_since)
                waited[""] += at - ends[place]
                waited[others[place].lane] += ends[place] - start
                at = start
            idle_since = max(idle_since, op.end)
        return dict(waited)

    def verdict(self) -> str:
        """Describe the bottleneck in a sentence or two."""
        busy = self.busy
        if not busy or not self.window:
            return "Nothing was recorded of it."
        lane, seconds = max(busy.items(), key=lambda item: item[1])
        name = NAMES[lane]
        if lane in (SSD_READ, SSD_WRITE):
            both = self._covered(op for op in self.operations if op.lane in (SSD_READ, SSD_WRITE))
            name, seconds = (SSD, both) if both > 1.05 * seconds else (name, seconds)
        share = seconds / self.window
        if share >= BUSY:
            said = f"The bottleneck is {name}: busy for {share:.0%} of the step."
        elif share >= MOST:
            said = f"The busiest is {name}, for {share:.0%} of the step; nothing is busy all the time."
        else:
            said = f"No lane is busy all the time; the busiest is {name}, for {share:.0%} of the step."
        return f"{said} {self._waiting()}"

    def _waiting(self) -> str:
        waits = self.waits
        share = sum(waits.values()) / self.window
        if share < 0.02:
            return "Computing hardly ever waits."
        lane, seconds = max(waits.items(), key=lambda item: item[1])
        what = NAMES.get(lane, "threads to take over, or for other processes")
        return f"Computing waits for {share:.0%} of it, most of all for {what}: {seconds / self.window:.0%}."


def rows_of(operations: list[Operation]) -> list[list[Operation]]:
    """Distribute operations over rows without overlaps: each goes to the first row that is free when it starts."""
    rows: list[list[Operation]] = []
    for op in sorted(operations, key=lambda op: (op.start, op.end)):
        free = next((row for row in rows if row[-1].end <= op.start), None)
        if free is None:
            rows.append([op])
        else:
            free.append(op)
    return rows
