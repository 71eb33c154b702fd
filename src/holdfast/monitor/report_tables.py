"""The tables of a report as HTML (traffic, memory, predictions, events), and the page around them.

The page is one self-contained file: no script, no font, no picture from elsewhere. All texts are escaped here, because
names come from the run. A difference from the schedule that is no fault is shown with its cause. Called by
``run_report``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..quantities import counted, format_bytes, format_seconds
from ..schedule.operations import COMMIT, COMPUTE, DOWNLOAD, SSD_READ, SSD_WRITE, UPDATE, UPLOAD
from . import facts
from .charts import Curve, Level, Scale, chart, milliseconds
from .history import History, StepRecord
from .lanes import NAMES

FORMULAS = {
    "vertical": {
        "upload_params": "(2n − 1) P", "load_params": "(2n − 1) P", "download_grads": "n G",
        "download_input": "n M S", "upload_input": "(2n − 2) M S",
        "download_input_grad": "(n − 1) M S", "upload_input_grad": "(n − 1) M S",
        "load_state": "n W", "store_state": "n W", "store_params": "n P",
    },
    "horizontal": {
        "upload_params": "(2n − 1) M P", "load_params": "(2n − 1) M P", "download_grads": "M n G",
        "upload_grads": "(M − 1) n G", "download_input": "(n − 1) M S", "upload_input": "(n − 1) M S",
        "load_state": "n W", "store_state": "n W", "store_params": "n P",
    },
}  # fmt: skip
"""Bytes by schedule and kind of operation, for n equal blocks, in plain order without delayed updates.

SSD formulas apply to the blocks that are on the SSD.
"""
SYMBOLS = (
    "n blocks of P bytes of parameters, G of gradients and W of optimizer state; M micro-batches, each with S bytes"
    " between two blocks."
)
SHORTER, OTHER_SIZE = "shorter samples", "inputs of another size"
UNDER_WAY, OF_BEFORE = "rest under way", "rest of an earlier step"
"""Causes of a difference that is no fault."""
UNDER_WAY_SAID = (
    "A step leaves writes to be done beside the next, so the writes of one step may be missing from the mean, or be in"
    " it once too often."
)
LAST_EVENTS = 40
BYTES = Scale(format_bytes, binary=True)


def traffic(history: History) -> str:
    found = facts.traffic(history)
    if found is None:
        return absent(
            "Not known: only an engine knows what a step should move, and what its first step moves is not compared,"
            " since nothing of a step before it goes on beside it."
        )
    delays, keeps = found["delayed_fraction"] > 0, found["recomputed_fraction"] < 1
    plain = found["order"] == "plain" and not delays and not keeps
    formulas = FORMULAS.get(found["schedule"], {}) if plain else {}
    order = found["schedule"] if plain else f"{found['schedule']}, {found['order']}"
    reasons = {_reason(row, found) for row in found["rows"]}
    said = (
        f"Bytes of a step, the mean of {counted(found['steps'], 'step')} of the last sitting, with"
        f" {found['micro_batches']} micro-batch{'es' * (found['micro_batches'] != 1)} in the {order} order."
        " What a step leaves to be done beside the next is counted there; the schedule counts block inputs in whole"
        " pages."
    )
    notes = [SYMBOLS] if formulas else []
    notes += [_samples_text(found)] if {SHORTER, OTHER_SIZE} & reasons else []
    notes += [UNDER_WAY_SAID] if {UNDER_WAY, OF_BEFORE} & reasons else []
    body = "".join(paragraph(note, "soft") for note in notes)
    return paragraph(said) + _traffic_table(found, formulas) + body


def _traffic_table(found: dict[str, Any], formulas: dict[str, str]) -> str:
    """Return the rows by lane, each lane named once. Without formulas there is no column of them."""
    rows, lane_before = [], None
    for row in found["rows"]:
        lane = "" if row["lane"] == lane_before else NAMES.get(row["lane"], row["lane"])
        lane_before = row["lane"]
        formula = [formulas.get(row["kind"], "")] if formulas else []
        sizes = [format_bytes(row["expected"]), format_bytes(row["moved"])]
        difference = _difference(row, _reason(row, found))
        rows.append([lane, row["kind"].replace("_", " "), *formula, *sizes, difference])
    formula = ["formula"] if formulas else []
    return table(["lane", "what", *formula, ">by the schedule", ">measured", "difference"], rows)


def _difference(row: dict[str, Any], reason: str) -> str:
    expected, moved = row["expected"], row["moved"]
    if round(expected) == round(moved):
        return "none"
    if expected:
        return f"{moved / expected - 1:+.1%}" + (f", {reason}" if reason else "")
    return "not measured beforehand" if "input" in row["kind"] else "not in the schedule"


def _reason(row: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the cause of a difference that is no fault; empty if there is none, or no such cause."""
    expected, moved = row["expected"], row["moved"]
    if not expected or round(expected) == round(moved):
        return ""
    if "input" in row["kind"]:
        full, tokens = found["scheduled_tokens"], found["tokens"]
        if full is None or tokens is None:
            return OTHER_SIZE if moved else ""
        return SHORTER if 0 < moved < expected and tokens < full else ""
    if row["lane"] == SSD_WRITE and abs(moved - expected) * found["steps"] <= expected * 1.001:
        return UNDER_WAY if moved < expected else OF_BEFORE
    return ""


def _samples_text(found: dict[str, Any]) -> str:
    full, tokens = found["scheduled_tokens"], found["tokens"]
    if full is None or tokens is None:
        said = "Block inputs grow with the tokens of a step. The schedule counts those that were measured beforehand"
        return said + (f"; these steps had {tokens:,.0f} tokens on the average." if tokens else ".")
    return (
        f"Block inputs grow with the tokens of a step. The schedule counts samples as long as the context, {full:,}"
        f" tokens in a step; these steps had {tokens:,.0f} on the average."
    )


def memory(history: History) -> str:
    found, line = facts.memory(history), history.line()
    if found is None:
        return absent("The log does not say.")
    if "ring_bytes" in found:
        return _memory_of_checkpointer(found, line)
    points = [(step.step, float(step.host_bytes)) for step in line if step.host_bytes is not None]
    budget, predicted = found["host_budget"], found["host_predicted"]
    said = f"The process held {format_bytes(found['host_bytes'] or 0)} at the most after any step. "
    said += f"Its budget is {format_bytes(budget)}. " if budget else "It has no budget. "
    said += (
        f"{format_bytes(predicted)} at most were predicted." if predicted else "Its memory was not predicted."
    )
    if found["device_bytes"] is not None:
        said += f" The device's allocator held {format_bytes(found['device_bytes'])} at the most."
    levels = [Level("budget", budget)] if budget else []
    levels += [Level("predicted at most", predicted, "predicted")] if predicted else []
    body = paragraph(said)
    if points:
        body += chart([Curve("memory of the process", points)], BYTES, levels)
    rows = [[row["class"], _size(row["predicted"]), _size(row["measured"])] for row in found["classes"]]
    if found["process_bytes"] is not None:
        rows.append(["the process itself, with torch", _size(found["process_bytes"]), "-"])
    if rows:
        body += table(["class of host memory", ">predicted at most", ">in use at once at most"], rows)
        body += paragraph(
            "Where nothing is measured the memory is torch's own, which does not say what it is for.", "soft"
        )
    return body


def _memory_of_checkpointer(found: dict[str, Any], line: list[StepRecord]) -> str:
    said = (
        f"memory= allows {_size(found['budget'])} for copies that wait to be written: {_size(found['ring_bytes'])} are"
        f" the ring of records, and copies of a base may take {_size(found['staging_bytes'])}. At a look once a second,"
        f" {_size(found['waiting_bytes'])} of records and {_size(found['staged_bytes'])} of a base waited at the most."
        " What the training itself takes is the script's own, and was not measured."
    )
    curves = [
        Curve(name, [(step.step, float(n)) for step in line if (n := getattr(step, key)) is not None], kind)
        for name, key, kind in (
            ("records that wait", "waiting_bytes", "a"),
            ("copies of a base", "staged_bytes", "b"),
        )
    ]
    if not any(curve.points for curve in curves):
        return paragraph(said)
    return paragraph(said) + chart(curves, BYTES)


def predictions(history: History, step_seconds: float | None) -> str:
    rows = []
    for row in facts.predictions(history, step_seconds):
        form = format_bytes if row["unit"] == "B" else milliseconds
        rows.append(
            [
                row["what"],
                form(row["predicted"]),
                form(row["measured"]),
                f"{row['measured'] / row['predicted']:.2f}",
            ]
        )
    body = table(["what", ">predicted", ">measured", ">measured / predicted"], rows) if rows else ""
    planned = facts.planned(history)
    if planned is not None:
        body += paragraph(_plan_text(planned.plan), "soft")
        light = facts.speed_of_light(history)
        body += paragraph(_speed_of_light_text(light)) if light else ""
    elif step_seconds is None:
        body += absent(
            "The time of a step was not predicted: give what `holdfast plan` says, as --predicted 0.85s."
        )
    return body


def _plan_text(plan: dict[str, Any]) -> str:
    """Describe what was chosen, and the bottleneck."""
    parts = [f"{share:.0%} of {kind}" for kind, share in plan.get("on_host", {}).items()]
    said = f"Planned: {', '.join(parts)} in host memory, {plan.get('delayed_fraction', 0.0):.0%} of updates delayed."
    given = plan.get("stated")
    said += f" Given, not chosen: {', '.join(given)}." if given else ""
    return f"{said} {plan.get('busiest')} was to be busy {plan.get('busiest_part', 0.0):.0%} of a step."


def _speed_of_light_text(light: dict[str, Any]) -> str:
    """Describe how near the steps came to the least time of their plan."""
    said = (
        f"Steps ran at {' '.join(facts.describe_speed_of_light(light))}: the busiest lane works"
        f" {milliseconds(light['light_seconds'])} a step by the measured rates, and the median step took"
        f" {milliseconds(light['median_seconds'])}."
    )
    if light["share"] > 1:
        said += " More than 100% means that rates were measured too low, or that samples are shorter than planned."
    return said


def happened(history: History) -> str:
    rows = [
        [_when(event), event["event"].replace("_", " "), _told(event)]
        for event in history.other_events[-LAST_EVENTS:]
    ]
    if not rows:
        return absent("Nothing but steps.")
    more = len(history.other_events) - len(rows)
    note = paragraph(f"The last {len(rows)}; {more} before are in the log.", "soft") if more else ""
    return table(["when", "what", ""], rows) + note


def _told(event: dict[str, Any]) -> str:
    """Describe an event in one line."""
    if event["event"] == "run":
        return f"from step {event.get('first_step', 0):,} on, process {event.get('pid')}"
    if event["event"] == "finished":
        return f"step {event.get('step', 0):,}, after {format_seconds(event.get('seconds', 0.0))}"
    left_out = {"event", "time", "measured", "trace", "config", "changed", "sample"}
    return ", ".join(
        f"{key.replace('_', ' ')} {_value(key, v)}" for key, v in event.items() if key not in left_out
    )


def _value(key: str, value: Any) -> str:
    if isinstance(value, float) and key.endswith("seconds"):
        return format_seconds(value)
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and key in ("bytes", "base_bytes", "cap", "used")
    ):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _when(event: dict[str, Any]) -> str:
    seconds = event.get("time")
    return "" if seconds is None else time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def _size(count: float | None) -> str:
    return "-" if count is None else format_bytes(count)


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


@dataclass(frozen=True)
class Section:
    """A part of the report; ``body`` is HTML. Elements of class ``wide`` scroll on a narrow screen."""

    title: str
    body: str


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
