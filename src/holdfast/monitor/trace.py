"""Traces of a run for Perfetto (ui.perfetto.dev) and chrome://tracing, in the JSON of the Trace Event Format.

Times are microseconds from the run's first event. The run is one process with steps, events and counters. Each step
whose operations were recorded is another process, with a thread for each row of each lane: operations that overlap are
in different rows, since slices of one thread must nest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .history import History, StepRecord
from .lanes import NAMES, Operation, Timeline, rows_of

RUN = 1
"""The process of the run itself; those of recorded steps follow."""

STEPS = 1
"""The thread of steps in the run's process."""

Event = dict[str, Any]


def chrome_trace(history: History, name: str) -> dict[str, Any]:
    """Return all that ``history`` has as one document."""
    origin = _origin(history)
    timelines = [timeline for sitting in history.sittings for timeline in sitting.timelines]
    events = [*_run_events(history, name, origin)]
    for number, timeline in enumerate(timelines):
        events += _timeline_events(timeline, RUN + 1 + number, origin)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _origin(history: History) -> float:
    """Return the earliest time of any step or event."""
    times = [step.time - step.seconds * step.steps for sitting in history.sittings for step in sitting.steps]
    times += [event["time"] for event in history.other_events if "time" in event]
    times += [timeline.began for sitting in history.sittings for timeline in sitting.timelines]
    return min(times, default=0.0)


def _run_events(history: History, name: str, origin: float) -> Iterator[Event]:
    yield _named("process_name", RUN, 0, name)
    yield _named("thread_name", RUN, STEPS, "steps")
    ended = origin
    for sitting in history.sittings:
        for step in sitting.steps:
            yield _slice_of(step, origin, ended)
            yield from _counters(step, origin)
            ended = step.time
    for event in history.other_events:
        args = {
            key: value for key, value in event.items() if key not in ("event", "time", "config", "sample")
        }
        yield {
            "name": event["event"], "cat": "event", "ph": "i", "s": "p", "pid": RUN, "tid": STEPS,
            "ts": _micro(event.get("time", origin) - origin), "args": args,
        }  # fmt: skip


def _slice_of(step: StepRecord, origin: float, after: float) -> Event:
    """Return the slice of a step.

    It ends when the step was logged, a moment late, and begins at ``after``, the end of the step before, at the
    earliest.
    """
    begins = max(step.time - step.seconds * step.steps, after)
    first = step.step - step.steps + 1
    name = f"step {step.step}" if step.steps == 1 else f"steps {first} to {step.step}"
    return {
        "name": name, "cat": "step", "ph": "X", "pid": RUN, "tid": STEPS,
        "ts": _micro(begins - origin), "dur": _micro(step.time - begins),
        "args": {"loss": step.loss, "durable_step": step.durable_step, "skipped": step.skipped},
    }  # fmt: skip


def _counters(step: StepRecord, origin: float) -> Iterator[Event]:
    """Yield the values that are drawn as curves, at the end of ``step``."""
    seconds = step.seconds * step.steps
    values = {
        "loss": step.loss,
        "steps not durable": step.lag,
        "host bytes": step.host_bytes,
        "device bytes": step.device_bytes,
        "bytes that wait": step.waiting_bytes,
        "tokens per second": step.tokens / seconds if step.tokens and seconds else None,
        "SSD bytes read per second": step.read_bytes / seconds if step.read_bytes and seconds else None,
        "SSD bytes written per second": step.written_bytes / seconds
        if step.written_bytes and seconds
        else None,
    }
    for name, value in values.items():
        if value is not None:
            at = _micro(step.time - origin)
            yield {"name": name, "ph": "C", "pid": RUN, "tid": 0, "ts": at, "args": {"value": value}}


def _timeline_events(timeline: Timeline, process: int, origin: float) -> Iterator[Event]:
    yield _named("process_name", process, 0, f"step {timeline.step} by lane")
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}
    begins = timeline.began - origin
    thread = 0
    for lane, operations in timeline.by_lane().items():
        rows = rows_of(operations)
        for number, row in enumerate(rows):
            thread += 1
            label = NAMES[lane] if len(rows) == 1 else f"{NAMES[lane]} {number + 1}"
            yield _named("thread_name", process, thread, label)
            yield {
                "name": "thread_sort_index", "ph": "M", "pid": process, "tid": thread,
                "args": {"sort_index": thread},
            }  # fmt: skip
            for op in row:
                yield _operation(op, process, thread, begins)
    end = {"s": "p", "pid": process, "tid": 1, "ts": _micro(begins + timeline.seconds)}
    yield {"name": "step() returned", "cat": "step", "ph": "i", **end, "args": {}}


def _operation(op: Operation, process: int, thread: int, begins: float) -> Event:
    return {
        "name": op.label, "cat": op.lane, "ph": "X", "pid": process, "tid": thread,
        "ts": _micro(begins + op.start), "dur": _micro(op.end - op.start),
        "args": {"step": op.step, "bytes": op.nbytes},
    }  # fmt: skip


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _micro(seconds: float) -> float:
    """Return microseconds, to a thousandth; a time before the first event counts as 0."""
    return max(round(seconds * 1e6, 3), 0.0)
