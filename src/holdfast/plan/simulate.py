"""The simulator: how long steps take on a machine, what keeps which lane busy, and what memory they hold.

Seconds, bytes. Event-driven and exact for its model: a lane serves one operation at a time, of those that
are ready the one that comes first, and never interrupts it. As in the engine, a step is known once the last
computation of the step before is over; its other operations run beside those of the earlier step, which go
first. Buffers are taken when an operation starts and given back when it ends.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .machine import Machine
from .ops import COMPUTE, LANES, Hold, Key, Op, traffic


class Span(NamedTuple):
    """One operation on the timeline."""

    op: Op
    start: float
    end: float
    step: int


@dataclass(frozen=True)
class Simulation:
    """What was found. ``peak`` is over all simulated steps."""

    machine: Machine
    spans: tuple[Span, ...]
    """In the order of their starts."""
    step_ends: tuple[float, ...]
    """When the last operation of each step was over."""
    peak_by_kind: dict[tuple[str, str], int]
    """Most bytes held at once, by (place, class of buffer)."""
    peak: dict[str, int]
    """Most bytes held at once, by place."""

    @property
    def seconds_per_step(self) -> float:
        """In the steady state: over the later half of the steps."""
        last, middle = len(self.step_ends) - 1, (len(self.step_ends) - 1) // 2
        if last == middle:
            return self.step_ends[last]
        return (self.step_ends[last] - self.step_ends[middle]) / (last - middle)

    def of_step(self, step: int = -1) -> list[Span]:
        """The operations of one step."""
        return [span for span in self.spans if span.step == step % len(self.step_ends)]

    def busy_seconds(self, step: int = -1) -> dict[str, float]:
        """How long each lane works for one step."""
        busy = dict.fromkeys(LANES, 0.0)
        for span in self.of_step(step):
            busy[span.op.lane] += span.end - span.start
        return busy

    def traffic(self, step: int = -1) -> Counter[tuple[str, str]]:
        """Bytes moved by one step, by (lane, kind of operation)."""
        return traffic(span.op for span in self.of_step(step))

    def busiest(self, step: int = -1) -> tuple[str, float]:
        """The lane (or the SSD, where its lanes compete) that works longest for one step, and how long. No
        order of the same operations takes less than that."""
        busy: Counter[str] = Counter()
        for lane, seconds in self.busy_seconds(step).items():
            busy[self.machine.server(lane)] += seconds
        return max(busy.items(), key=lambda item: item[1])

    def over_busiest(self) -> float:
        """Seconds per step over those of the busiest lane: 1 is the roofline."""
        return self.seconds_per_step / self.busiest()[1]


def simulate(steps: Sequence[Sequence[Op]], machine: Machine) -> Simulation:
    """Time ``steps``, one operation list each, one after another. ``[operations] * 4`` is four equal steps."""
    return _Run(steps, machine).run()


@dataclass
class _Run:
    """The state of a simulation. Operations of all steps have one index, which is also their priority."""

    steps: Sequence[Sequence[Op]]
    machine: Machine
    ops: list[Op] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    dependents: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ready: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    working: set[str] = field(default_factory=set)
    ends: list[tuple[float, int]] = field(default_factory=list)
    held: dict[tuple[int, tuple], Hold] = field(default_factory=dict)
    in_use: Counter[tuple[str, str]] = field(default_factory=Counter)
    peak_by_kind: Counter[tuple[str, str]] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)

    def run(self) -> Simulation:
        self._link()
        step_of = [number for number, operations in enumerate(self.steps) for _ in operations]
        step_ends, spans = [0.0] * len(self.steps), []
        for index, missing in enumerate(self.missing):
            if not missing:
                self._offer(index)
        now = 0.0
        self._start(now, step_of, spans)
        while self.ends:
            now = self.ends[0][0]
            while self.ends and self.ends[0][0] == now:
                index = heapq.heappop(self.ends)[1]
                self._end(index, step_of[index])
                step_ends[step_of[index]] = max(now, step_ends[step_of[index]])
            self._start(now, step_of, spans)
        assert not any(self.missing), "the operations wait for each other"
        return Simulation(
            self.machine, tuple(spans), tuple(step_ends), dict(self.peak_by_kind), dict(self.peak)
        )

    def _link(self) -> None:
        """Who waits for whom."""
        latest: dict[Key, int] = {}
        gate: int | None = None
        for operations in self.steps:
            here: dict[Key, int] = {}
            computed = gate
            for op in operations:
                index = len(self.ops)
                needed = [here[key] for key in op.needs]
                if gate is not None and not needed:
                    needed.append(gate)
                needed += [latest[key] for key in op.needs_previous if key in latest]
                for other in needed:
                    self.dependents[other].append(index)
                self.missing.append(len(needed))
                self.ops.append(op)
                here[op.key] = index
                if op.lane == COMPUTE:
                    computed = index
            gate = computed
            latest.update(here)

    def _offer(self, index: int) -> None:
        heapq.heappush(self.ready[self.machine.server(self.ops[index].lane)], index)

    def _start(self, now: float, step_of: list[int], spans: list[Span]) -> None:
        """Give every idle lane the first operation that is ready for it."""
        for server, waiting in self.ready.items():
            if waiting and server not in self.working:
                index = heapq.heappop(waiting)
                op = self.ops[index]
                self.working.add(server)
                for hold in op.takes:
                    self._take(step_of[index], hold)
                end = now + self.machine.seconds(op)
                heapq.heappush(self.ends, (end, index))
                spans.append(Span(op, now, end, step_of[index]))

    def _end(self, index: int, step: int) -> None:
        op = self.ops[index]
        self.working.remove(self.machine.server(op.lane))
        for name in op.gives:
            hold = self.held.pop((step, name))
            self.in_use[hold.place, hold.kind] -= hold.nbytes
            self.total[hold.place] -= hold.nbytes
        for other in self.dependents.pop(index, ()):
            self.missing[other] -= 1
            if not self.missing[other]:
                self._offer(other)

    def _take(self, step: int, hold: Hold) -> None:
        place, kind = hold.place, (hold.place, hold.kind)
        self.held[step, hold.name] = hold
        self.in_use[kind] += hold.nbytes
        self.total[place] += hold.nbytes
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self.in_use[kind])
        self.peak[place] = max(self.peak[place], self.total[place])
