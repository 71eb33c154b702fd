"""The simulator: how long steps take on a machine, what keeps which lane busy, and what memory they hold.

It is event-driven and exact for its model: a lane serves one operation at a time, chosen as ``operations`` says.
Transfers of the SSD consist of small requests, so there a more urgent operation overtakes the one under way. As in the
engine, a step is known once the last computation of the step before is over; its other operations run beside those of
the earlier step. Buffers are taken when an operation starts and given back when it ends. A result can be drawn as text
or as a trace (chrome://tracing, Perfetto). Called by the planner and by ``holdfast simulate``. Seconds, bytes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..garbage import without_collection
from .operations import COMPUTE, LANES, SSD_READ, SSD_WRITE, Hold, Key, Op, traffic
from .planner.machine_rates import Machine


@without_collection()
def simulate(steps: Sequence[Sequence[Op]], machine: Machine) -> Simulation:
    """Time ``steps``, one operation list each, one after another; ``[operations] * 4`` is four equal ones."""
    run = _Run(steps, machine)
    while run.start_what_is_ready():
        run.end_what_is_next()
    assert len(run.spans) == run.links.num_operations, "operations wait for each other"
    return Simulation(
        machine, tuple(run.spans), tuple(run.step_ends), run.memory.peak, run.memory.peak_by_kind
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
        self.memory = _Memory()
        lists: dict[int, _List] = {}
        for operations in steps:
            if id(operations) not in lists:
                lists[id(operations)] = _List(operations, machine, self.memory)
        self.links = _Links([lists[id(operations)] for operations in steps])
        self.spans: list[Span] = []
        self.step_ends = [0.0] * len(steps)
        servers = {machine.server(lane): _Server(lane in (SSD_READ, SSD_WRITE)) for lane in LANES}
        self._servers = list(servers.values())
        self._of_lane = {lane: servers[machine.server(lane)] for lane in LANES}
        self._ready = [index for index, missing in enumerate(self.links.missing) if not missing]
        self._now = 0.0
        self._starts: dict[int, float] = {}
        self._events: list[tuple[float, int, int]] = []  # end, operation, its server's turn

    def start_what_is_ready(self) -> bool:
        """Let every lane serve its most urgent operation; return False if nothing is under way."""
        for index in self._ready:
            made, number, _ = self.links.find(index)
            op = made.operations[number]
            self._of_lane[op.lane].offer((op.priority, index), made.seconds[number])
        self._ready = []
        for server in self._servers:
            index = server.serve(self._now) if server.changed else None
            if index is None:
                continue
            heapq.heappush(self._events, (server.until, index, server.turn))
            if index not in self._starts:
                self._starts[index] = self._now
                made, number, _ = self.links.find(index)
                self.memory.take(made.takes[number])
        return bool(self._events)

    def end_what_is_next(self) -> None:
        """Advance to the next end of an operation, and end all operations that end then."""
        self._now = self._events[0][0]
        while self._events and self._events[0][0] == self._now:
            _, index, turn = heapq.heappop(self._events)
            made, number, step = self.links.find(index)
            op = made.operations[number]
            server = self._of_lane[op.lane]
            if turn == server.turn:  # otherwise it was overtaken meanwhile
                server.free()
                self.memory.give(made.gives[number])
                self.spans.append(Span(op, self._starts[index], self._now, step))
                if op.lane == COMPUTE or made.last_computation is None:
                    self.step_ends[step] = self._now
                self._ready += self.links.over(index)


class _List:
    """An operation list on a machine: what every step that plays it needs again.

    An operation's number is its place in the list.
    """

    def __init__(self, operations: Sequence[Op], machine: Machine, memory: _Memory) -> None:
        self.operations = operations
        self.seconds = [machine.seconds(op) for op in operations]
        self.last_computation: int | None = None
        self.numbers: dict[Key, int] = {}
        self.num_needed: list[int] = []
        """Number of operations of the list that each one needs."""
        self.dependents: list[list[int]] = [[] for _ in operations]
        """The operations of the list that need each one."""
        self._waits: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        taken = [hold for op in operations for hold in op.takes]
        holds = {hold.name: hold for hold in taken}
        assert len({*taken}) == len(holds), "a buffer is taken in two sizes"
        self.takes = [[memory.change(hold) for hold in op.takes] for op in operations]
        self.gives = [[memory.change(holds[name]) for name in op.gives] for op in operations]
        for number, op in enumerate(operations):
            for key in op.needs:
                self.dependents[self.numbers[key]].append(number)
            self.num_needed.append(len(op.needs))
            self.numbers[op.key] = number
            if op.lane == COMPUTE:
                self.last_computation = number

    def waits(self, before: Sequence[_List]) -> list[tuple[int, int, int]]:
        """Return what waits for earlier steps: operation, number of the list ``before``, operation of that list.

        ``before`` has the lists of the steps before, the latest first.
        """
        which = tuple(map(id, before))
        if which not in self._waits:
            self._waits[which] = [
                (number, place, there)
                for number, op in enumerate(self.operations)
                for key in op.needs_previous
                for place, there in _first_with(before, key)
            ]
        return self._waits[which]


def _first_with(lists: Sequence[_List], key: Key) -> list[tuple[int, int]]:
    """Return the number of the first list that has ``key``, and the operation's; empty if none has it."""
    found = ((place, made.numbers[key]) for place, made in enumerate(lists) if key in made.numbers)
    return list(itertools.islice(found, 1))


class _Links:
    """Dependencies of the operations. Operations of all steps have one index, which is also their order of service."""

    def __init__(self, steps: Sequence[_List]) -> None:
        self.missing: list[int] = []
        """Number of operations that each one still waits for."""
        self.num_operations = sum(len(made.operations) for made in steps)
        self._steps = steps
        self._step_of: list[int] = []
        self._starts: list[int] = []
        self._later: dict[int, list[int]] = {}  # operations of later steps that wait for one
        latest: dict[int, int] = {}  # by list, the first index of the latest step that plays it
        before: list[_List] = []
        returned: int | None = None  # the last computation of the step before
        for step, made in enumerate(steps):
            start = len(self.missing)
            self._starts.append(start)
            self._step_of += [step] * len(made.operations)
            self.missing += made.num_needed
            for number, place, there in made.waits(before):
                self._wait(start + number, latest[id(before[place])] + there)
            if returned is not None:
                for number, needed in enumerate(made.num_needed):
                    if not needed:
                        self._wait(start + number, returned)
            if made.last_computation is not None:
                returned = start + made.last_computation
            latest[id(made)] = start
            before = [made, *(other for other in before if other is not made)]

    def _wait(self, index: int, other: int) -> None:
        self._later.setdefault(other, []).append(index)
        self.missing[index] += 1

    def find(self, index: int) -> tuple[_List, int, int]:
        """Return an operation's list, its number there, and its step."""
        step = self._step_of[index]
        return self._steps[step], index - self._starts[step], step

    def over(self, index: int) -> list[int]:
        """Note that operation ``index`` is over, and return the operations that waited only for it."""
        made, number, step = self.find(index)
        start, missing = self._starts[step], self.missing
        ready = []
        for other in (*(start + each for each in made.dependents[number]), *self._later.get(index, ())):
            missing[other] -= 1
            if not missing[other]:
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
    """The bytes held, and the most ever held, by place and by class of buffer."""

    def __init__(self) -> None:
        self._by_place: dict[str, list[int]] = {}  # now, and the most
        self._by_kind: dict[tuple[str, str], list[int]] = {}

    def change(self, hold: Hold) -> _Change:
        """Return what taking ``hold`` changes."""
        place = self._by_place.setdefault(hold.place, [0, 0])
        return place, self._by_kind.setdefault((hold.place, hold.kind), [0, 0]), hold.nbytes

    def take(self, changes: Sequence[_Change]) -> None:
        for place, kind, nbytes in changes:
            for count in (place, kind):
                count[0] += nbytes
                if count[0] > count[1]:
                    count[1] = count[0]

    def give(self, changes: Sequence[_Change]) -> None:
        for place, kind, nbytes in changes:
            place[0] -= nbytes
            kind[0] -= nbytes
            assert kind[0] >= 0, "a buffer is given back that is not held"

    @property
    def peak(self) -> dict[str, int]:
        return {place: most for place, (_, most) in self._by_place.items()}

    @property
    def peak_by_kind(self) -> dict[tuple[str, str], int]:
        return {kind: most for kind, (_, most) in self._by_kind.items()}


_Change = tuple[list[int], list[int], int]
"""Counts of a place and of a class of buffers, and the bytes by which they change."""
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
