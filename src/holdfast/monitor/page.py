"""Page: the HTML of a report. One self-contained file: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..schedule.operations import COMMIT, COMPUTE, DOWNLOAD, SSD_READ, SSD_WRITE, UPDATE, UPLOAD

LANE_COLOURS = {
    COMPUTE: ("#2a78d6", "#3987e5"), SSD_READ: ("#1baf7a", "#199e70"), SSD_WRITE: ("#eb6834", "#d95926"),
    UPLOAD: ("#4a3aa7", "#9085e9"), DOWNLOAD: ("#e87ba4", "#d55181"), UPDATE: ("#eda100", "#c98500"),
    COMMIT: ("#e34948", "#e66767"),
}  # fmt: skip
"""Colours of lanes on a light and on a dark page."""

LIGHT = {
    "page": "#f7f7f5", "card": "#fdfdfc", "ink": "#17171a", "soft": "#56565c", "line": "#e2e2de", "track": "#efefec",
    "edge": "#c9c9c4", "a": "#2a78d6", "b": "#eb6834", "limit": "#c22f2e", "predicted": "#4a3aa7", "now": "#56565c",
    "other": "#c3c3c0",
}  # fmt: skip
DARK = {
    "page": "#121213", "card": "#1b1b1d", "ink": "#f3f3f1", "soft": "#b1b1b4", "line": "#313135", "track": "#252528",
    "edge": "#4a4a50", "a": "#3987e5", "b": "#d95926", "limit": "#e66767", "predicted": "#9085e9", "now": "#b1b1b4",
    "other": "#505055",
}  # fmt: skip

STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0;overflow-wrap:anywhere} h2{font-size:17px;margin:0 0 8px}
p{margin:6px 0;max-width:85ch} .soft,footer{color:var(--soft)} code{font-size:13px;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:18px 20px;margin:16px 0}
.absent{color:var(--soft)} .verdict{font-size:16px;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:18px 0 0;padding:0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tiles dt{color:var(--soft);font-size:13px} .tiles dd{margin:0;font-size:20px;font-weight:600}
.wide{overflow-x:auto;background:linear-gradient(90deg,var(--card) 12px,transparent 40px) 0 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--card) 12px,transparent 40px) 100% 0/40px 100% no-repeat local,
linear-gradient(90deg,var(--edge),transparent) 0 0/12px 100% no-repeat scroll,
linear-gradient(270deg,var(--edge),transparent) 100% 0/12px 100% no-repeat scroll}
svg{display:block;width:100%;height:auto} svg.small{display:none}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;min-width:55%;margin:8px 0}
th{font-weight:500;color:var(--soft);text-align:left}
td,th{padding:3px 14px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right} td.n{white-space:nowrap} tr:last-child td{border-bottom:0}
.grid{stroke:var(--line)} .axis{stroke:var(--soft)}
.tick,.share{fill:var(--soft);font-size:12px}
.lane{fill:var(--ink);font-size:12px;paint-order:stroke;stroke:var(--card);stroke-width:3px}
.track{fill:var(--track)} .returned{stroke:var(--ink);stroke-dasharray:3 3}
.curve{fill:none;stroke-width:2;stroke-linejoin:round} .band{opacity:.2} .level{stroke-width:1.5;stroke-dasharray:6 4}
.hit{fill:transparent} .hit:hover{fill:var(--ink)} .op.light{opacity:.65} .op.other{opacity:.28}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;margin:8px 0 0;padding:0}
.legend{color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px;vertical-align:-1px}
@media(max-width:900px){.large .tick{font-size:17px} .large.gantt text{font-size:16px}}
@media(max-width:600px){
main{padding:16px 12px 40px} section{padding:14px} .tiles{grid-template-columns:repeat(auto-fit,minmax(130px,1fr))}
svg.large{display:none} svg.small{display:block} table{font-size:13px} td,th{padding-right:8px}
}
"""
"""Shadows at the edges of what scrolls (``wide``) say that there is more. The large drawings have larger text below 900
pixels, and below 600 the small ones stand in their place, so that a label has at least 10 pixels on a phone of 360."""


@dataclass(frozen=True)
class Section:
    """A part of the report; ``body`` is HTML. Elements of class ``wide`` scroll on a narrow screen."""

    title: str
    body: str


def page(
    title: str, subtitle: str, tiles: Sequence[tuple[str, str]], sections: Sequence[Section], foot: str
) -> str:
    """Return the whole document. All texts except the sections' bodies are escaped here."""
    tile_items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles
    )
    parts = "".join(f"<section><h2>{escape(s.title)}</h2>{s.body}</section>" for s in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} - holdfast</title><style>{_style()}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p><dl class="tiles">{tile_items}</dl>'
        f"{parts}<footer><p>{escape(foot)}</p></footer></main></body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def absent(text: str) -> str:
    """Return a paragraph that says what is missing, and why."""
    return paragraph(text, "absent")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Columns whose names begin with ``>`` are right-aligned."""
    kinds = [' class="n"' if column.startswith(">") else "" for column in columns]
    head = "".join(f"<th{kind}>{escape(name.lstrip('>'))}</th>" for kind, name in zip(kinds, columns))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _style() -> str:
    """Return the style sheet with the colours of both pages."""
    light = LIGHT | {lane: colours[0] for lane, colours in LANE_COLOURS.items()}
    dark = DARK | {lane: colours[1] for lane, colours in LANE_COLOURS.items()}
    named = "".join(
        f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}.k-{name}{{background:var(--{name})}}"
        for name in light
    )
    values = [";".join(f"--{name}:{value}" for name, value in each.items()) for each in (light, dark)]
    return (
        f":root{{color-scheme:light dark;{values[0]}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{values[1]}}}}}{STYLE}{named}"
    )
