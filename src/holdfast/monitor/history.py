"""The history of a run, read from its event log in order. Units are seconds and bytes; times are unix seconds.

A run consists of *sittings*: an engine or a ``Checkpointer`` from its opening until it was closed or died. A resume may
repeat steps: ``line`` has each step once, as the newest sitting did it, but written bytes count every time. What the
log does not tell stays None. An event of an unexpected form is counted and skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..events import read_events
from ..schedule.planner.machine_rates import SHARED_BY
from .lanes import Timeline

TOLD = (
    "began_from", "recovered", "shares", "resumed", "gap", "storage", "cadence", "every", "base", "kept", "not_kept",
    "not_taken", "not_persisted", "drift", "replica_failed", "pushed", "push_failed", "stopped",
    "failed", "finished", "run", "rollback", "certified",
)  # fmt: skip
"""Events that are kept unchanged."""
BEGINNINGS = {
    "engine": ("first_step", "parameters", "blocks", "state_bytes", "device"),
    "checkpointer": ("first_step", "ranks", "codec", "replica"),
}
"""Events that begin a sitting, with the keys that they must have."""
Traffic = Counter[tuple[str, str]]
"""Bytes by (lane, kind of operation)."""


@dataclass(slots=True)
class StepRecord:
    """One step; or ``steps`` of them up to ``step``, with mean times and summed bytes."""

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
    micro_batches: int | None = None
    skipped: str | None = None

    @classmethod
    def of(cls, event: dict[str, Any]) -> StepRecord:
        """Build a step from its event. Raises ``KeyError`` or ``TypeError`` if ``event`` describes no step."""
        numbers = {name: event[name] for name in cls.__slots__ if event.get(name) is not None}
        texts = {name: numbers.pop(name) for name in ("skipped",) if name in numbers}
        found = cls(**{name: value + 0 for name, value in numbers.items()}, **texts)
        if found.steps < 1 or not isinstance(found.step, int):
            raise TypeError(f"no step: {event}")
        return found

    @property
    def lag(self) -> int:
        """The number of steps that a power cut would lose."""
        return max(self.step - self.durable_step, 0)


Shape = tuple[int, bool]
"""The shape of a step: its number of micro-batches, and whether it ends in a commit."""


@dataclass
class Session:
    """One opening of the run. ``kind`` is "engine" or "checkpointer", or empty if the log does not tell."""

    kind: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    schedules: dict[Shape, dict[str, Any]] = field(default_factory=dict)
    shapes: Counter[Shape] = field(default_factory=Counter)
    """The number of steps of each shape whose traffic is in ``moved``."""
    moved: Traffic = field(default_factory=Counter)
    """Traffic of all steps except skipped ones and the first, beside which no earlier step is finished."""
    buffers: dict[str, int] = field(default_factory=dict)
    """The largest number of bytes in use at once, by purpose."""
    timelines: list[Timeline] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    """The planner's choices and predictions, if it ran."""
    closed: dict[str, Any] | None = None
    rollbacks: dict[int, int] = field(default_factory=dict)
    """The step that the process went back to, by the number of entries of ``steps`` before."""

    @property
    def first_step(self) -> int | None:
        """The number of steps done when the sitting began."""
        told = self.about.get("first_step")
        return told if told is not None or not self.steps else self.steps[0].step - self.steps[0].steps

    @property
    def written_bytes(self) -> int | None:
        """Bytes written to the disk from opening to end; up to the last step if the sitting did not end."""
        end = self.closed or {}
        if "moved" in end:
            return sum(end["moved"].get("ssd_write", {}).values())
        if "written_bytes" in end:
            return end["written_bytes"]
        told = [step.written_bytes for step in self.steps if step.written_bytes is not None]
        return sum(told) if told else None

    def line(self) -> list[StepRecord]:
        """Return the steps, oldest first, without those that a rollback has abandoned."""
        kept: list[StepRecord] = []
        for number in range(len(self.steps) + 1):
            while kept and number in self.rollbacks and kept[-1].step > self.rollbacks[number]:
                kept.pop()
            kept += self.steps[number : number + 1]
        return kept

    def add_step(self, event: dict[str, Any]) -> None:
        step, moved = StepRecord.of(event), traffic_of(event.get("moved", {}))
        if moved and self.steps and step.skipped is None:
            self.shapes[event["micro_batches"], event["commit"]] += 1
            self.moved.update(moved)
        self.buffers = event.get("buffers", self.buffers)
        self.steps.append(step)


class History:
    """The history of a run, which grows event by event."""

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.sittings: list[Session] = []
        self.config: dict[str, Any] = {}
        """The configuration of ``holdfast train``."""
        self.other_events: list[dict[str, Any]] = []
        """Events other than steps."""
        self.validations: list[tuple[int, float | None]] = []
        """Steps with their losses on held-out text; None for a loss that is no finite number."""
        self.last_time: float | None = None
        self.num_unreadable = 0
        self.newest: dict[str, Any] = {}
        """The last step event, complete."""
        self._line: list[StepRecord] | None = None
        for event in events:
            self.add(event)

    @classmethod
    def read(cls, path: Path) -> History:
        return cls(read_events(path))

    @property
    def sitting(self) -> Session:
        """The current sitting."""
        if not self.sittings:
            self.sittings.append(Session())
        return self.sittings[-1]

    def add(self, event: dict[str, Any]) -> None:
        self._line = None
        try:
            self._add(event, event["event"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            self.num_unreadable += 1
        else:
            self.last_time = event.get("time", self.last_time)

    def _add(self, event: dict[str, Any], name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"no event: {event}")
        if name == "step":
            self.sitting.add_step(event)
            self.newest = event
        elif name in BEGINNINGS:
            self.sittings.append(Session(name, {key: event[key] for key in BEGINNINGS[name]} | event))
        elif name == "schedule":
            self.sitting.schedules[event["micro_batches"], event["commit"]] = event
        elif name == "plan":
            checked = {"step_seconds": event["step_seconds"] + 0.0, "light_seconds": light_seconds(event)}
            self.sitting.plan = event | checked
        elif name == "timeline":
            self.sitting.timelines.append(Timeline.of(event))
        elif name == "closed":
            self.sitting.closed = event
        elif name == "validation":
            loss = event["loss"]
            self.validations.append((event["step"] + 0, None if loss is None else loss + 0.0))
        elif name in TOLD:
            if name == "run":
                self.config = event.get("config", {})
            if name == "rollback":
                self.sitting.rollbacks[len(self.sitting.steps)] = event["step"] + 0
            self.other_events.append(event)

    def line(self) -> list[StepRecord]:
        """Return every step once, oldest first."""
        if self._line is not None:
            return self._line
        steps: list[StepRecord] = []
        for sitting in self.sittings:
            first = sitting.first_step
            while steps and first is not None and steps[-1].step > first:
                steps.pop()
            steps += sitting.line()
        self._line = steps
        return steps

    @property
    def num_steps(self) -> int:
        """The number of steps done, repeated ones included."""
        return sum(step.steps for sitting in self.sittings for step in sitting.steps)

    @property
    def written_bytes(self) -> int | None:
        """Bytes written by all sittings that report them."""
        told = [n for n in (sitting.written_bytes for sitting in self.sittings) if n is not None]
        return sum(told) if told else None

    @property
    def timeline(self) -> Timeline | None:
        """The newest timeline that is not of a sitting's first step, which nothing overlaps; else the newest."""
        found = [timeline for sitting in self.sittings for timeline in sitting.timelines]
        steady = [timeline for timeline in found if not timeline.is_first]
        return (steady or found or [None])[-1]

    @property
    def last_schedule(self) -> tuple[Session, dict[str, Any]] | None:
        """The newest sitting with schedules, and the schedule of its most frequent shape."""
        for sitting in reversed(self.sittings):
            if sitting.schedules:
                shape = max(sitting.schedules, key=lambda shape: sitting.shapes[shape])
                return sitting, sitting.schedules[shape]
        return None


def light_seconds(plan: dict[str, Any]) -> float | None:
    """Return the seconds that a planned step's busiest resource works; None if the event does not tell."""
    busy, busiest = plan.get("busy_seconds", {}), plan.get("busiest")
    return sum(busy[lane] + 0.0 for lane in busy if busiest in (lane, SHARED_BY.get(lane))) or None


def traffic_of(by_lane: dict[str, dict[str, int]]) -> Traffic:
    """Return bytes by (lane, kind) from an event's bytes by lane."""
    return Counter({(lane, kind): n for lane, kinds in by_lane.items() for kind, n in kinds.items()})


def expected(sitting: Session) -> Traffic:
    """Return the traffic that the steps counted in ``moved`` should have had, by their schedules."""
    total: Traffic = Counter()
    for shape, count in sitting.shapes.items():
        for key, nbytes in traffic_of(sitting.schedules.get(shape, {}).get("moves", {})).items():
            total[key] += nbytes * count
    return total
