"""Charts: curves over steps as inline SVG, without a script. The page's classes set colours; titles show numbers.

Units are pixels of a drawing that is ``WIDTH`` wide, which the page scales. With more points than columns, a curve is
the mean of each column, and behind it the band from least to most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
Format = Callable[[float], str]

WIDTH, HEIGHT = 1080, 250
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 12, 34
COLUMNS = 240
"""The largest number of points of a curve."""


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
    whole: bool = False
    """True for counts, which have no fractions."""

    def ticks(self, low: float, high: float) -> list[float]:
        if self.binary:
            each = 2.0 ** math.ceil(math.log2(max((high - low) / 5, 1.0)))
            return [number * each for number in range(math.floor(low / each), math.ceil(high / each) + 1)]
        return ticks(low, high, least=float(self.whole))


class Frame:
    """The mapping from values to pixels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], scale: Scale) -> None:
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
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def chart(curves: Sequence[Curve], scale: Scale, levels: Sequence[Level] = ()) -> str:
    """Draw ``curves`` in one frame, with a legend if it shows several things. At least one curve must have a point."""
    form = scale.form
    points = [point for curve in curves for point in curve.points]
    heights = [y for _, y in points] + [level.value for level in levels]
    frame = Frame([x for x, _ in points], heights, scale)
    parts = [*_grid(frame, form), *(_level(frame, level, form) for level in levels)]
    for curve in curves:
        if curve.points:
            parts += _dots(frame, curve, form) if curve.dots else _curve(frame, curve, form)
    names = " and ".join(curve.name for curve in curves)
    body = "".join(parts)
    drawn = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(names)}">{body}</svg>'
    entries = [(curve.kind, curve.name) for curve in curves if curve.points]
    entries += [(level.kind, f"{level.name}: {form(level.value)}") for level in levels]
    return drawn + (legend(entries) if len(entries) > 1 else "")


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


def _grid(frame: Frame, form: Format) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in frame.ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{form(value)}</text>'
        )
    for value in ticks(frame.x_low, frame.x_high, 8):
        if frame.x_low <= value <= frame.x_high and value == int(value):
            x = frame.x(value)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:,.0f}</text>'
            )
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    parts.append(f'<text class="tick" x="{right}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    return parts


def _level(frame: Frame, level: Level, form: Format) -> str:
    y = frame.y(level.value)
    return (
        f'<line class="level s-{level.kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}">'
        f"<title>{escape(level.name)}: {form(level.value)}</title></line>"
    )


def _curve(frame: Frame, curve: Curve, form: Format) -> list[str]:
    groups = columns_of(curve.points)
    line = " ".join(f"{frame.x(x):.1f},{frame.y(mean):.1f}" for x, mean, _, _ in groups)
    parts = []
    if len(groups) < len(curve.points):
        upper = [f"{frame.x(x):.1f},{frame.y(most):.1f}" for x, _, _, most in groups]
        lower = [f"{frame.x(x):.1f},{frame.y(least):.1f}" for x, _, least, _ in reversed(groups)]
        parts.append(f'<polygon class="band f-{curve.kind}" points="{" ".join(upper + lower)}"/>')
    parts.append(f'<polyline class="curve s-{curve.kind}" points="{line}"/>')
    parts += [_dot(frame, curve, form, x, mean, small=len(groups) > 60) for x, mean, _, _ in groups]
    return parts


def _dots(frame: Frame, curve: Curve, form: Format) -> list[str]:
    return [_dot(frame, curve, form, x, y) for x, y in curve.points]


def _dot(frame: Frame, curve: Curve, form: Format, x: float, y: float, small: bool = False) -> str:
    """Draw a point that shows its values on hover; one of many is invisible otherwise."""
    kind = "hit" if small else f"dot f-{curve.kind}"
    at = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{4 if small else 3}"'
    return f'<circle class="{kind}" {at}><title>{escape(curve.name)}, {x:,.0f}: {form(y)}</title></circle>'
