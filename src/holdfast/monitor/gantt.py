"""Gantt: one step by lane, as inline SVG. A lane has a row for each concurrent operation, at most four.

Operations narrower than a pixel are joined with their neighbours, so ten thousand operations stay a small picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ..quantities import format_bytes
from .charts import legend, ticks
from .lanes import NAMES, Operation, Timeline, rows_of

WIDTH, LEFT, RIGHT, ROW, GAP, FOOT = 1080, 168, 96, 14, 10, 30
MOST_ROWS = 4
NARROW = 0.8
"""The width in pixels below which an operation is joined."""


@dataclass
class _Bar:
    """One operation, or several narrow ones."""

    x: float
    right: float
    operations: list[Operation]


def gantt(timeline: Timeline) -> str:
    """Draw ``timeline``, from its beginning until the whole step was over."""
    busy, end = timeline.busy, max(timeline.end, 1e-9)
    scale = (WIDTH - LEFT - RIGHT) / end
    parts: list[str] = []
    y = 4.0
    for lane, operations in timeline.by_lane().items():
        rows = rows_of([op for op in operations if op.end > 0 and op.start < end])
        if not rows:
            continue
        rows = [*rows[: MOST_ROWS - 1], [op for row in rows[MOST_ROWS - 1 :] for op in row]]
        rows = [row for row in rows if row]
        height = len(rows) * ROW
        share = busy[lane] / timeline.window
        parts.append(
            f'<text class="lane" x="{LEFT - 10}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{NAMES[lane]}</text>'
        )
        parts.append(
            f'<rect class="track" x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{height}"/>'
        )
        parts.append(
            f'<text class="share" x="{WIDTH - RIGHT + 8}" y="{y + height / 2 + 4:.1f}">{share:.0%} busy</text>'
        )
        for number, row in enumerate(rows):
            parts += [_rect(bar, lane, timeline, y + number * ROW) for bar in _bars(row, scale, end)]
        y += height + GAP
    parts += _axis(timeline, scale, end, y)
    label = f"step {timeline.step} by lane"
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {y + FOOT:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )
    return picture + legend(
        [("now", f"of step {timeline.step}"), ("other", "of the step before it or after it")]
    )


def _bars(row: list[Operation], scale: float, end: float) -> list[_Bar]:
    """Return the bars of a row in the order of their starts; narrow operations that touch become one bar."""
    bars: list[_Bar] = []
    for op in sorted(row, key=lambda op: op.start):
        x, right = LEFT + max(op.start, 0.0) * scale, LEFT + min(op.end, end) * scale
        last = bars[-1] if bars else None
        touches = last is not None and x - last.right < NARROW and last.operations[0].step == op.step
        if last is not None and touches and (right - x < NARROW or last.right - last.x < NARROW):
            last.right = max(right, last.right)
            last.operations.append(op)
        else:
            bars.append(_Bar(x, right, [op]))
    return bars


def _rect(bar: _Bar, lane: str, timeline: Timeline, y: float) -> str:
    first = bar.operations[0]
    kind = f"op f-{lane}" + (" other" if first.step != timeline.step else "")
    kind += " light" if first.phase == "forward" or first.kind == "forward" else ""
    place = f'x="{bar.x:.2f}" y="{y + 1:.1f}" width="{max(bar.right - bar.x, 0.6):.2f}" height="{ROW - 2}"'
    return f'<rect class="{kind}" {place}><title>{escape(_title(bar.operations))}</title></rect>'


def _title(operations: list[Operation]) -> str:
    first, last = operations[0], operations[-1]
    took = f"{milliseconds(last.end - first.start)}, from {milliseconds(first.start)} on"
    size = sum(op.nbytes for op in operations)
    moved = f", {format_bytes(size)}" if size else ""
    if len(operations) > 1:
        return f"{len(operations)} operations, {first.label} to {last.label}: {took}{moved}"
    return f"{first.label} of step {first.step}: {took}{moved}"


def _axis(timeline: Timeline, scale: float, end: float, y: float) -> list[str]:
    parts = []
    for value in ticks(0.0, end, 8):
        if value <= end:
            x = LEFT + value * scale
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle">{milliseconds(value)}</text>'
            )
    x = LEFT + timeline.seconds * scale
    parts.append(f'<line class="returned" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y + 4:.1f}"/>')
    parts.append(
        f'<text class="tick" x="{x:.1f}" y="{y + 27:.1f}" text-anchor="middle">step() returned</text>'
    )
    return parts


def milliseconds(seconds: float) -> str:
    """Format ``seconds`` in a suitable unit.

    >>> milliseconds(0.0), milliseconds(0.01234), milliseconds(12.5)
    ('0', '12.3 ms', '12.5 s')
    """
    if not seconds:
        return "0"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"
