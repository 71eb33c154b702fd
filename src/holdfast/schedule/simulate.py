"""The simulator: how long steps take on a machine, what keeps which lane busy, and what memory they hold.

It is event-driven and exact for its model: a lane serves one operation at a time, chosen as ``operations`` says.
Transfers of the SSD consist of small requests, so there a more urgent operation overtakes the one under way. As in the
engine, a step is known once the last computation of the step before is over; its other operations run beside those of
the earlier step. Buffers are taken when an operation starts and given back when it ends. A result can be drawn as text
or as a trace (chrome://tracing, Perfetto). Called by the planner and by ``holdfast simulate``. Seconds, bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .operations import COMPUTE, LANES, SSD_READ, SSD_WRITE, Hold, Key, Op, traffic
from .planner.machine_rates import Machine


def simulate(steps: Sequence[Sequence[Op]], machine: Machine) -> Simulation:
    """Time ``steps``, one operation list each, one after another; ``[operations] * 4`` is four equal ones."""
    run = _Run(steps, machine)
    while run.start_what_is_ready():
        run.end_what_is_next()
    assert len(run.spans) == len(run.links.ops), "operations wait for each other"
    return Simulation(
        machine,
        tuple(run.spans),
        tuple(run.step_ends),
        dict(run.memory.peak),
        dict(run.memory.peak_by_kind),
    )


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation."""

    machine: Machine
    spans: tuple[Span, ...]
    """All operations, in the order of their ends."""
    step_ends: tuple[float, ...]
    """End of each step: of its last computation, or of its last operation if it has no computations."""
    peak: dict[str, int]
    """Most bytes held at once, by place."""
    peak_by_kind: dict[tuple[str, str], int]
    """Most bytes held at once, by (place, class of buffer)."""

    @property
    def seconds_per_step(self) -> float:
        """Seconds per step in the steady state: the mean over the later half of the steps."""
        last, middle = len(self.step_ends) - 1, (len(self.step_ends) - 1) // 2
        if last == middle:
            return self.step_ends[last]
        return (self.step_ends[last] - self.step_ends[middle]) / (last - middle)

    def of_step(self, step: int = -1) -> list[Span]:
        """Return the operations of one step, by default of the last."""
        return [span for span in self.spans if span.step == step % len(self.step_ends)]

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds that each lane works for the last step."""
        busy = dict.fromkeys(LANES, 0.0)
        for span in self.of_step():
            busy[span.op.lane] += self.machine.seconds(span.op)
        return busy

    def traffic(self) -> Counter[tuple[str, str]]:
        """Return the bytes that the last step moves, by (lane, kind of operation)."""
        return traffic(span.op for span in self.of_step())

    def busiest(self) -> tuple[str, float]:
        """Return the lane (or shared resource) that works longest for the last step, and its seconds.

        No order of the same operations takes less than that.
        """
        return max(self.machine.by_server(self.busy_seconds()).items(), key=lambda item: item[1])

    @property
    def speed_of_light(self) -> float:
        """Fraction of a step's time for which the busiest lane works: 1 if it never waits.

        A few steps may take less than their share of that lane's work, part of which is left for later.
        """
        return min(self.busiest()[1] / self.seconds_per_step, 1.0)


class Span(NamedTuple):
    """One operation in simulated time. An operation that was overtaken lasts longer than it occupied its lane."""

    op: Op
    start: float
    end: float
    step: int


class _Run:
    """The state of a simulation at a time (``_now``)."""

    def __init__(self, steps: Sequence[Sequence[Op]], machine: Machine) -> None:
        self.links, self.memory = _Links(steps), _Memory()
        self.spans: list[Span] = []
        self.step_ends = [0.0] * len(steps)
        servers = {machine.server(lane): _Server(lane in (SSD_READ, SSD_WRITE)) for lane in LANES}
        of_lane = {lane: servers[machine.server(lane)] for lane in LANES}
        self._servers = list(servers.values())
        self._server_of = [of_lane[op.lane] for op in self.links.ops]
        self._seconds = [machine.seconds(op) for op in self.links.ops]
        self._ready = [index for index, missing in enumerate(self.links.missing) if not missing]
        self._now = 0.0
        self._starts: dict[int, float] = {}
        self._events: list[tuple[float, int, int]] = []  # end, operation, its server's turn

    def start_what_is_ready(self) -> bool:
        """Let every lane serve its most urgent operation; return False if nothing is under way."""
        for index in self._ready:
            self._server_of[index].offer((self.links.ops[index].priority, index), self._seconds[index])
        self._ready = []
        for server in self._servers:
            index = server.serve(self._now) if server.changed else None
            if index is None:
                continue
            heapq.heappush(self._events, (server.until, index, server.turn))
            if index not in self._starts:
                self._starts[index] = self._now
                self.memory.take(self.links.ops[index], self.links.step_of[index])
        return bool(self._events)

    def end_what_is_next(self) -> None:
        """Advance to the next end of an operation, and end all operations that end then."""
        self._now = self._events[0][0]
        while self._events and self._events[0][0] == self._now:
            _, index, turn = heapq.heappop(self._events)
            server = self._server_of[index]
            if turn == server.turn:  # otherwise it was overtaken meanwhile
                server.free()
                self._end(index)

    def _end(self, index: int) -> None:
        op, step = self.links.ops[index], self.links.step_of[index]
        self.memory.give(op, step)
        self.spans.append(Span(op, self._starts[index], self._now, step))
        if op.lane == COMPUTE or not self.links.computes[step]:
            self.step_ends[step] = self._now
        self._ready += self.links.over(index)


class _Links:
    """Dependencies of the operations. Operations of all steps have one index, which is also their order of service."""

    def __init__(self, steps: Sequence[Sequence[Op]]) -> None:
        self.ops = [op for operations in steps for op in operations]
        self.step_of = [step for step, operations in enumerate(steps) for _ in operations]
        self.computes = [any(op.lane == COMPUTE for op in operations) for operations in steps]
        self.missing: list[int] = []
        self._dependents: list[list[int]] = [[] for _ in self.ops]
        earlier: dict[Key, int] = {}
        returned: int | None = None  # the last computation of the step before
        for operations in steps:
            here: dict[Key, int] = {}
            computed = returned
            for op in operations:
                index = len(self.missing)
                needed = [here[key] for key in op.needs]
                needed += [earlier[key] for key in op.needs_previous if key in earlier]
                if returned is not None and not op.needs:
                    needed.append(returned)
                for other in needed:
                    self._dependents[other].append(index)
                self.missing.append(len(needed))
                here[op.key] = index
                computed = index if op.lane == COMPUTE else computed
            returned = computed
            earlier.update(here)

    def over(self, index: int) -> list[int]:
        """Note that operation ``index`` is over, and return the operations that waited only for it."""
        ready = []
        for other in self._dependents[index]:
            self.missing[other] -= 1
            if not self.missing[other]:
                ready.append(other)
        return ready


class _Server:
    """A resource that serves one operation of its lanes at a time."""

    def __init__(self, preempts: bool) -> None:
        self.turn = 0
        """Changes whenever another operation is served, which makes planned ends void."""
        self.changed = False
        """True if an operation was offered, or one ended, since the server last chose."""
        self.until = 0.0
        self._preempts = preempts
        self._waiting: list[tuple[tuple[int, int], float]] = []  # (priority, index), seconds left
        self._current: tuple[int, int] | None = None

    def offer(self, rank: tuple[int, int], seconds: float) -> None:
        heapq.heappush(self._waiting, (rank, seconds))
        self.changed = True

    def serve(self, now: float) -> int | None:
        """Begin (or continue) the most urgent operation; return it if it was not the one under way."""
        self.changed = False
        if not self._waiting:
            return None
        if self._current is not None:
            if not self._preempts or self._current < self._waiting[0][0]:
                return None
            heapq.heappush(self._waiting, (self._current, self.until - now))
        self._current, seconds = heapq.heappop(self._waiting)
        self.turn += 1
        self.until = now + seconds
        return self._current[1]

    def free(self) -> None:
        self._current = None
        self.changed = True


class _Memory:
    """The buffers held, and the most bytes ever held."""

    def __init__(self) -> None:
        self.peak: Counter[str] = Counter()
        self.peak_by_kind: Counter[tuple[str, str]] = Counter()
        self._held: dict[tuple[int, tuple], Hold] = {}
        self._by_kind: Counter[tuple[str, str]] = Counter()
        self._total: Counter[str] = Counter()

    def take(self, op: Op, step: int) -> None:
        for hold in op.takes:
            kind = (hold.place, hold.kind)
            self._held[step, hold.name] = hold
            self._by_kind[kind] += hold.nbytes
            self._total[hold.place] += hold.nbytes
            self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self._by_kind[kind])
            self.peak[hold.place] = max(self.peak[hold.place], self._total[hold.place])

    def give(self, op: Op, step: int) -> None:
        for name in op.gives:
            hold = self._held.pop((step, name))
            self._by_kind[hold.place, hold.kind] -= hold.nbytes
            self._total[hold.place] -= hold.nbytes


SHADES = " .:-=+*#"
"""Characters for the busy fraction of a column, in eighths; the last is for a lane that is busy all the time."""


def window(found: Simulation) -> tuple[float, float]:
    """Return the start and end of the last step: one step of the steady state."""
    ends = found.step_ends
    return (ends[-2] if len(ends) > 1 else 0.0), ends[-1]


def busy_columns(found: Simulation, columns: int) -> dict[str, list[float]]:
    """Return, for each lane that works, the busy fraction of each column of ``window``."""
    start, stop = window(found)
    width = (stop - start) / columns
    busy = {lane: [0.0] * columns for lane in LANES}
    for span in found.spans if width else ():
        first, last = (int((at - start) / width) for at in (span.start, span.end))
        for column in range(max(first, 0), min(last, columns - 1) + 1):
            left, right = start + column * width, start + (column + 1) * width
            busy[span.op.lane][column] += max(0.0, min(span.end, right) - max(span.start, left)) / width
    return {lane: [min(part, 1.0) for part in parts] for lane, parts in busy.items() if any(parts)}


def text_timeline(found: Simulation, columns: int = 72) -> list[str]:
    """Return a line per lane, darker where it is busier."""
    drawn = busy_columns(found, columns)
    names = max(map(len, drawn), default=0)
    return [f"{lane:<{names}} |{''.join(map(_shade, parts))}|" for lane, parts in drawn.items()]


def chrome_trace(runs: dict[str, Simulation]) -> dict[str, Any]:
    """Return all spans of several simulations as a trace: a process each, a thread for each lane. Microseconds."""
    events: list[dict[str, Any]] = []
    for process, (name, found) in enumerate(runs.items()):
        events.append(_named("process_name", process, 0, name))
        events += [_named("thread_name", process, thread, lane) for thread, lane in enumerate(LANES)]
        events += [_event(process, span) for span in found.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _shade(part: float) -> str:
    return SHADES[min(int(part * len(SHADES)), len(SHADES) - 1)]


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(process: int, span: Span) -> dict[str, Any]:
    op, key = span.op, span.op.key
    parts = [key.kind, key.phase]
    parts += [f"block {key.block}"] if key.block >= 0 else []
    parts += [f"micro-batch {key.micro_batch}"] if key.micro_batch >= 0 else []
    return {
        "name": " ".join(filter(None, parts)),
        "ph": "X",
        "pid": process,
        "tid": LANES.index(op.lane),
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {"step": span.step, "bytes": op.nbytes, "work": op.work},
    }
