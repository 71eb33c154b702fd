"""The picture of one step by lane, as inline SVG, with a row for each concurrent operation, at most four.

It is drawn for a large screen, with the names of the lanes at the left, and for a phone, with each name above its lane.
Operations narrower than a pixel are joined with their neighbours, so ten thousand operations stay a small picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape

from ..quantities import format_bytes
from .charts import Canvas, legend, ticks
from .lanes import NAMES, Operation, Timeline, rows_of

ROW, GAP, FOOT, NAME = 14, 10, 32, 18
LARGE_GANTT = Canvas("large gantt", left=230, right=96)
SMALL_GANTT = Canvas("small gantt", width=340, left=4, right=26, most_ticks=3)
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
    drawn = "".join(_gantt_drawn(canvas, timeline) for canvas in (LARGE_GANTT, SMALL_GANTT))
    return drawn + legend(
        [("now", f"of step {timeline.step}"), ("other", "of the step before it or after it")]
    )


def _gantt_drawn(canvas: Canvas, timeline: Timeline) -> str:
    busy, end = timeline.busy, max(timeline.end, 1e-9)
    scale = (canvas.width - canvas.left - canvas.right) / end
    parts: list[str] = []
    names: list[str] = []
    y = 4.0
    for lane, rows in _rows_by_lane(timeline, end).items():
        height, share = len(rows) * ROW, busy[lane] / timeline.window
        y += _names(names, canvas, NAMES[lane], f"{share:.0%} busy", y, height)
        parts.append(
            f'<rect class="track" x="{canvas.left}" y="{y:.1f}" width="{canvas.width - canvas.left - canvas.right}"'
            f' height="{height}"/>'
        )
        for number, row in enumerate(rows):
            bars = _bars(row, canvas.left, scale, end)
            parts += [_rect(bar, lane, timeline, y + number * ROW) for bar in bars]
        y += height + GAP
    parts += [*_axis(canvas, timeline, scale, end, y), *names]
    return replace(canvas, height=round(y + FOOT)).svg("".join(parts), f"step {timeline.step} by lane")


def _rows_by_lane(timeline: Timeline, end: float) -> dict[str, list[list[Operation]]]:
    """Return the rows of each lane that did something in the step; the last row may hold several at once."""
    found = {}
    for lane, operations in timeline.by_lane().items():
        rows = rows_of([op for op in operations if op.end > 0 and op.start < end])
        rows = [*rows[: MOST_ROWS - 1], [op for row in rows[MOST_ROWS - 1 :] for op in row]]
        if rows := [row for row in rows if row]:
            found[lane] = rows
    return found


def _names(parts: list[str], canvas: Canvas, name: str, share: str, y: float, height: float) -> float:
    """Write the name of a lane and how busy it was. Return the height that this takes above the lane."""
    if canvas is SMALL_GANTT:
        parts.append(f'<text class="lane" x="{canvas.left}" y="{y + 13:.1f}">{name}, {share}</text>')
        return NAME
    middle = y + height / 2 + 4
    parts.append(
        f'<text class="lane" x="{canvas.left - 10}" y="{middle:.1f}" text-anchor="end">{name}</text>'
    )
    parts.append(f'<text class="share" x="{canvas.width - canvas.right + 8}" y="{middle:.1f}">{share}</text>')
    return 0


def _bars(row: list[Operation], left: float, scale: float, end: float) -> list[_Bar]:
    """Return the bars of a row in the order of their starts; narrow operations that touch become one bar."""
    bars: list[_Bar] = []
    for op in sorted(row, key=lambda op: op.start):
        x, right = left + max(op.start, 0.0) * scale, left + min(op.end, end) * scale
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


def _axis(canvas: Canvas, timeline: Timeline, scale: float, end: float, y: float) -> list[str]:
    parts = []
    for value in ticks(0.0, end, canvas.most_ticks):
        if value <= end:
            x = canvas.left + value * scale
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y:.1f}"/>')
            anchor = canvas.anchor(x, 6)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{y + 14:.1f}" text-anchor="{anchor}">{milliseconds(value)}</text>'
            )
    x = canvas.left + timeline.seconds * scale
    parts.append(f'<line class="returned" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y + 4:.1f}"/>')
    anchor = canvas.anchor(x, 15)
    parts.append(
        f'<text class="tick" x="{x:.1f}" y="{y + 29:.1f}" text-anchor="{anchor}">step() returned</text>'
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
