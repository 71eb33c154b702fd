"""Drawings as inline SVG, without a script: curves over steps, and one step by lane.

The page's classes set colours; titles show numbers. Each is drawn twice, for a large screen and for a phone, and the
page shows one of them: text that is scaled with one drawing would be unreadable on the other. Units are pixels of a
``Canvas``, which the page scales.

With more points than columns, a curve is the mean of each column, and behind it the band from least to most. A step has
a row for each concurrent operation of a lane, at most four. Operations narrower than a pixel are joined with their
neighbours, so ten thousand operations stay a small picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from ..quantities import format_bytes
from .lanes import NAMES, Operation, Timeline, rows_of

Point = tuple[float, float]
Format = Callable[[float], str]
COLUMNS = 240
"""The largest number of points of a curve."""


@dataclass(frozen=True)
class Canvas:
    """The size of a drawing and of its margins. ``kind`` is its class, by which the page shows or hides it."""

    kind: str
    width: int = 1080
    height: int = 250
    left: int = 100
    right: int = 16
    top: int = 12
    bottom: int = 40
    columns: int = COLUMNS
    most_ticks: int = 8
    """The largest number of distances between labels of the horizontal axis."""

    def anchor(self, x: float, characters: int) -> str:
        """Return where to hold a label at ``x``, so that it stays in the picture in letters of up to 17 pixels."""
        reach = characters * 5
        if x < reach:
            return "start"
        return "end" if x > self.width - reach else "middle"

    def svg(self, body: str, label: str) -> str:
        """Return ``body`` as a picture that is named ``label``."""
        size = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg class="{self.kind}" {size} role="img" aria-label="{escape(label)}">{body}</svg>'


LARGE = Canvas("large")
SMALL = Canvas("small", width=340, height=210, left=70, right=14, columns=80, most_ticks=3)


@dataclass(frozen=True)
class Curve:
    """A named line; ``kind`` is the class of its colour, and ``dots`` draws separate points instead."""

    name: str
    points: Sequence[Point]
    kind: str = "a"
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line: a budget, or a prediction."""

    name: str
    value: float
    kind: str = "limit"


@dataclass(frozen=True)
class Scale:
    """The vertical axis: the format of its numbers, and which numbers are round."""

    form: Format
    from_zero: bool = True
    binary: bool = False
    """True for bytes: ticks are powers of two apart."""
    are_counts: bool = False
    """True for counts, which have no fractions."""

    def ticks(self, low: float, high: float) -> list[float]:
        if self.binary:
            each = 2.0 ** math.ceil(math.log2(max((high - low) / 5, 1.0)))
            return [number * each for number in range(math.floor(low / each), math.ceil(high / each) + 1)]
        return ticks(low, high, least=float(self.are_counts))


class Frame:
    """The mapping from values to pixels of ``canvas``."""

    def __init__(self, canvas: Canvas, xs: Sequence[float], ys: Sequence[float], scale: Scale) -> None:
        self.canvas, self.form = canvas, scale.form
        self.x_low, self.x_high = min(xs), max(xs)
        low, high = min(ys), max(ys)
        low = min(low, 0.0) if scale.from_zero else low
        if high == low:
            low, high = low - (abs(low) or 1.0) * (not scale.from_zero), high + (abs(high) or 1.0)
        self.ticks = scale.ticks(low, high)
        self.y_low, self.y_high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        if self.x_high == self.x_low:
            self.x_low, self.x_high = self.x_low - 0.5, self.x_high + 0.5

    def x(self, value: float) -> float:
        on = self.canvas
        return on.left + (value - self.x_low) / (self.x_high - self.x_low) * (on.width - on.left - on.right)

    def y(self, value: float) -> float:
        on = self.canvas
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return on.height - on.bottom - share * (on.height - on.top - on.bottom)


def chart(curves: Sequence[Curve], scale: Scale, levels: Sequence[Level] = ()) -> str:
    """Draw ``curves`` in one frame, with a legend if it shows several things. At least one curve must have a point."""
    names = " and ".join(curve.name for curve in curves)
    drawn = "".join(canvas.svg(_drawn(canvas, curves, scale, levels), names) for canvas in (LARGE, SMALL))
    entries = [(curve.kind, curve.name) for curve in curves if curve.points]
    entries += [(level.kind, f"{level.name}: {scale.form(level.value)}") for level in levels]
    return drawn + (legend(entries) if len(entries) > 1 else "")


def _drawn(canvas: Canvas, curves: Sequence[Curve], scale: Scale, levels: Sequence[Level]) -> str:
    points = [point for curve in curves for point in curve.points]
    heights = [y for _, y in points] + [level.value for level in levels]
    frame = Frame(canvas, [x for x, _ in points], heights, scale)
    parts = [*_grid(frame), *(_level(frame, level) for level in levels)]
    for curve in curves:
        if curve.points:
            parts += _dots(frame, curve) if curve.dots else _curve(frame, curve)
    return "".join(parts)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return a legend of pairs of colour class and text."""
    items = "".join(f'<li><i class="k-{kind}"></i>{escape(name)}</li>' for kind, name in entries)
    return f'<ul class="legend">{items}</ul>'


def ticks(low: float, high: float, most: int = 5, least: float = 0.0) -> list[float]:
    """Return round numbers that cover ``low`` to ``high``, up to rounding, at least ``least`` apart.

    >>> ticks(0.0, 1.7)
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    rough = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(rough))
    each = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / each + 1e-9), math.ceil(high / each - 1e-9)
    return [round(number * each, 12) for number in range(first, last + 1)]


def columns_of(points: Sequence[Point], columns: int = COLUMNS) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, least, most) of at most ``columns`` groups of neighbours.

    >>> columns_of([(1, 2.0), (2, 4.0), (3, 6.0), (4, 0.0)], columns=2)
    [(1.5, 3.0, 2.0, 4.0), (3.5, 3.0, 0.0, 6.0)]
    """
    count = min(columns, len(points))
    found = []
    for number in range(count):
        part = points[len(points) * number // count : len(points) * (number + 1) // count]
        ys = [y for _, y in part]
        found.append((sum(x for x, _ in part) / len(part), sum(ys) / len(ys), min(ys), max(ys)))
    return found


def _grid(frame: Frame) -> list[str]:
    on = frame.canvas
    right, bottom = on.width - on.right, on.height - on.bottom
    parts = []
    for value in frame.ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{on.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{on.left - 6}" y="{y + 4:.1f}" text-anchor="end">{frame.form(value)}</text>'
        )
    for value in ticks(frame.x_low, frame.x_high, on.most_ticks):
        if frame.x_low <= value <= frame.x_high and value == int(value):
            x, label = frame.x(value), f"{value:,.0f}"
            anchor = on.anchor(x, len(label))
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{label}</text>'
            )
    parts.append(f'<line class="axis" x1="{on.left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    parts.append(f'<text class="tick" x="{right}" y="{on.height - 5}" text-anchor="end">step</text>')
    return parts


def _level(frame: Frame, level: Level) -> str:
    y, on = frame.y(level.value), frame.canvas
    return (
        f'<line class="level s-{level.kind}" x1="{on.left}" y1="{y:.1f}" x2="{on.width - on.right}" y2="{y:.1f}">'
        f"<title>{escape(level.name)}: {frame.form(level.value)}</title></line>"
    )


def _curve(frame: Frame, curve: Curve) -> list[str]:
    groups = columns_of(curve.points, frame.canvas.columns)
    line = " ".join(f"{frame.x(x):.1f},{frame.y(mean):.1f}" for x, mean, _, _ in groups)
    parts = []
    if len(groups) < len(curve.points):
        upper = [f"{frame.x(x):.1f},{frame.y(most):.1f}" for x, _, _, most in groups]
        lower = [f"{frame.x(x):.1f},{frame.y(least):.1f}" for x, _, least, _ in reversed(groups)]
        parts.append(f'<polygon class="band f-{curve.kind}" points="{" ".join(upper + lower)}"/>')
    parts.append(f'<polyline class="curve s-{curve.kind}" points="{line}"/>')
    small = 4 * len(groups) > frame.canvas.columns
    parts += [_dot(frame, curve, x, mean, small) for x, mean, _, _ in groups]
    return parts


def _dots(frame: Frame, curve: Curve) -> list[str]:
    return [_dot(frame, curve, x, y) for x, y in curve.points]


def _dot(frame: Frame, curve: Curve, x: float, y: float, small: bool = False) -> str:
    """Draw a point that shows its values on hover; one of many is invisible otherwise."""
    kind = "hit" if small else f"dot f-{curve.kind}"
    at = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{4 if small else 3}"'
    return (
        f'<circle class="{kind}" {at}><title>{escape(curve.name)}, {x:,.0f}: {frame.form(y)}</title></circle>'
    )


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
