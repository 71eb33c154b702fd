"""Timelines: one step of a simulation by lane, as text and as a trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

from typing import Any

from .operations import LANES
from .simulate import Simulation, Span

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
