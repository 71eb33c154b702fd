"""Bars as SVG, drawn by hand so that a figure needs nothing installed."""

from __future__ import annotations

from xml.sax.saxutils import escape

COLOURS = ("#1b6ca8", "#e0812b", "#4c9a5b", "#9a4c8c")
WIDTH, ROW, LEFT, TOP = 760, 15, 150, 56


def bars(title: str, values: dict[str, dict[str, float | None]], unit: str) -> str:
    """A group for each key of ``values``, in it a bar for each series. ``None`` is drawn as "not finished", what is
    below zero as no bar.

    >>> bars("Speed", {"car": {"uphill": 3.0}}, "km/h").count("<rect")
    3
    """
    series = list(dict.fromkeys(name for group in values.values() for name in group))
    most = max([value for group in values.values() for value in group.values() if value] + [1e-9])
    scale = (WIDTH - LEFT - 90) / most
    height = TOP + len(values) * (len(series) * ROW + 10) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif"'
        f' font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>'
    ]
    for number, name in enumerate(series):
        x = LEFT + number * 190
        out.append(f'<rect x="{x}" y="32" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>')
        out.append(f'<text x="{x + 15}" y="41">{escape(name)}</text>')
    y = TOP
    for group, found in values.items():
        middle = y + len(series) * ROW / 2 + 4
        out.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(group)}</text>')
        for number, name in enumerate(series):
            if name in found:
                out.append(_bar(y, found[name], scale, COLOURS[number % len(COLOURS)], unit))
            y += ROW
        y += 10
    return "\n".join([*out, "</svg>\n"])


def _bar(y: int, value: float | None, scale: float, colour: str, unit: str) -> str:
    length = 0.0 if value is None else max(0.0, value * scale)
    said = "not finished" if value is None else f"{value:.1f} {unit}"
    return (
        f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 3}" fill="{colour}"/>'
        f'<text x="{LEFT + length + 5:.1f}" y="{y + ROW - 5}" font-size="11">{escape(said)}</text>'
    )
