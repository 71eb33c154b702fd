"""History: what the log of events says of a run, in order. Seconds, bytes; times are unix seconds.

A run is made of *sittings*: an engine or a ``Checkpointer`` that was opened, until it was closed or died. A resume may
make steps again: ``line`` has each step once, as the newest sitting made it, while bytes written count as often as they
were. What the log does not say stays None. An event of another form than expected is counted, and passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..events import read_events
from .lanes import Timeline

TOLD = (
    "began_from", "recovered", "resumed", "gap", "storage", "cadence", "base", "kept", "not_kept", "not_taken",
    "not_persisted", "drift", "replica_failed", "pushed", "push_failed", "stopped", "failed", "finished", "run",
)  # fmt: skip
"""Events that are kept as they are."""

BEGINNINGS = {
    "engine": ("first_step", "parameters", "blocks", "state_bytes", "device"),
    "checkpointer": ("first_step", "ranks", "codec", "replica"),
}
"""Events that begin a sitting, and what they have at least."""

Traffic = Counter[tuple[str, str]]
"""Bytes, by (lane, kind of operation)."""


@dataclass(slots=True)
class Step:
    """One step; or ``steps`` of them up to ``step``, of which times are means and bytes sums."""

    step: int
    time: float
    seconds: float
    durable_step: int
    steps: int = 1
    loss: float | None = None
    tokens: int | None = None
    stall_seconds: float | None = None
    longest_stall_seconds: float | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    waiting_bytes: int | None = None
    staged_bytes: int | None = None
    skipped: str | None = None

    @classmethod
    def of(cls, event: dict[str, Any]) -> Step:
        """Raises ``KeyError`` or ``TypeError`` where ``event`` is of no step."""
        numbers = {name: event[name] for name in cls.__slots__ if event.get(name) is not None}
        texts = {name: numbers.pop(name) for name in ("skipped",) if name in numbers}
        found = cls(**{name: value + 0 for name, value in numbers.items()}, **texts)
        if found.steps < 1 or not isinstance(found.step, int):
            raise TypeError(f"no step: {event}")
        return found

    @property
    def lag(self) -> int:
        """Steps that a power cut would take."""
        return max(self.step - self.durable_step, 0)


Shape = tuple[int, bool]
"""Of a step: its micro-batches, and whether it ends in a commit."""


@dataclass
class Sitting:
    """One opening of the run. ``kind`` is "engine" or "checkpointer", or nothing where the log does not say."""

    kind: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    schedules: dict[Shape, dict[str, Any]] = field(default_factory=dict)
    shapes: Counter[Shape] = field(default_factory=Counter)
    """Steps of each shape whose traffic is in ``moved``."""
    moved: Traffic = field(default_factory=Counter)
    """By all steps but the first, which has nothing of a step before it to finish, and those that were skipped."""
    buffers: dict[str, int] = field(default_factory=dict)
    """What was in use at once at most, by what for."""
    timelines: list[Timeline] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    """What the planner chose and predicted, if it was asked."""
    closed: dict[str, Any] | None = None

    @property
    def first_step(self) -> int | None:
        """The steps done when it began."""
        told = self.about.get("first_step")
        return told if told is not None or not self.steps else self.steps[0].step - self.steps[0].steps

    @property
    def written_bytes(self) -> int | None:
        """To the disk, from its opening to its end; up to its last step if it did not end."""
        end = self.closed or {}
        if "moved" in end:
            return sum(end["moved"].get("ssd_write", {}).values())
        if "written_bytes" in end:
            return end["written_bytes"]
        told = [step.written_bytes for step in self.steps if step.written_bytes is not None]
        return sum(told) if told else None

    def add_step(self, event: dict[str, Any]) -> None:
        step, moved = Step.of(event), traffic_of(event.get("moved", {}))
        if moved and self.steps and step.skipped is None:
            self.shapes[event["micro_batches"], event["commit"]] += 1
            self.moved.update(moved)
        self.buffers = event.get("buffers", self.buffers)
        self.steps.append(step)


class History:
    """Grows event by event."""

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.sittings: list[Sitting] = []
        self.config: dict[str, Any] = {}
        """Of ``holdfast train``."""
        self.told: list[dict[str, Any]] = []
        """What happened besides steps."""
        self.validations: list[tuple[int, float]] = []
        self.last_time: float | None = None
        self.num_odd = 0
        self.newest: dict[str, Any] = {}
        """The last event of a step, all of it."""
        self._line: list[Step] | None = None
        for event in events:
            self.add(event)

    @classmethod
    def read(cls, path: Path) -> History:
        return cls(read_events(path))

    @property
    def sitting(self) -> Sitting:
        """The present one."""
        if not self.sittings:
            self.sittings.append(Sitting())
        return self.sittings[-1]

    def add(self, event: dict[str, Any]) -> None:
        self._line = None
        try:
            self._add(event, event["event"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            self.num_odd += 1
        else:
            self.last_time = event.get("time", self.last_time)

    def _add(self, event: dict[str, Any], name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"no event: {event}")
        if name == "step":
            self.sitting.add_step(event)
            self.newest = event
        elif name in BEGINNINGS:
            self.sittings.append(Sitting(name, {key: event[key] for key in BEGINNINGS[name]} | event))
        elif name == "schedule":
            self.sitting.schedules[event["micro_batches"], event["commit"]] = event
        elif name == "plan":
            self.sitting.plan = {"step_seconds": event["step_seconds"] + 0.0, **event}
        elif name == "timeline":
            self.sitting.timelines.append(Timeline.of(event))
        elif name == "closed":
            self.sitting.closed = event
        elif name == "validation":
            self.validations.append((event["step"], event["loss"] + 0.0))
        elif name in TOLD:
            if name == "run":
                self.config = event.get("config", {})
            self.told.append(event)

    def line(self) -> list[Step]:
        """Every step once, oldest first."""
        if self._line is not None:
            return self._line
        steps: list[Step] = []
        for sitting in self.sittings:
            first = sitting.first_step
            while steps and first is not None and steps[-1].step > first:
                steps.pop()
            steps += sitting.steps
        self._line = steps
        return steps

    @property
    def num_steps(self) -> int:
        """Steps done, as often as they were."""
        return sum(step.steps for sitting in self.sittings for step in sitting.steps)

    @property
    def written_bytes(self) -> int | None:
        """By all sittings that say."""
        told = [n for n in (sitting.written_bytes for sitting in self.sittings) if n is not None]
        return sum(told) if told else None

    @property
    def timeline(self) -> Timeline | None:
        """The newest that is not of the first step of a sitting, where nothing goes on beside it yet; or that."""
        found = [timeline for sitting in self.sittings for timeline in sitting.timelines]
        steady = [timeline for timeline in found if not timeline.is_first]
        return (steady or found or [None])[-1]

    @property
    def last_schedule(self) -> tuple[Sitting, dict[str, Any]] | None:
        """The newest sitting that says what its steps should move, and what it says of its commonest shape."""
        for sitting in reversed(self.sittings):
            if sitting.schedules:
                shape = max(sitting.schedules, key=lambda shape: sitting.shapes[shape])
                return sitting, sitting.schedules[shape]
        return None


def traffic_of(by_lane: dict[str, dict[str, int]]) -> Traffic:
    """Bytes by (lane, kind), of what an event has by lane."""
    return Counter({(lane, kind): n for lane, kinds in by_lane.items() for kind, n in kinds.items()})


def expected(sitting: Sitting) -> Traffic:
    """What the steps that ``moved`` counts should have moved, by their schedules."""
    total: Traffic = Counter()
    for shape, count in sitting.shapes.items():
        for key, nbytes in traffic_of(sitting.schedules.get(shape, {}).get("moves", {})).items():
            total[key] += nbytes * count
    return total
