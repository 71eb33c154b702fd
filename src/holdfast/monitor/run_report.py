"""The report of a run, as one HTML page and as one JSON document.

It shows only what was measured, says what is missing, and begins with what a person asks first: how far the run is, and
how much of it is durable. Called by ``holdfast report``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..quantities import counted, format_bytes
from . import facts
from .charts import Curve, Level, Scale, chart, gantt, milliseconds
from .facts import Drive, percent
from .history import History
from .lanes import NAMES
from .report_tables import Section, absent, happened, memory, page, paragraph, predictions, table, traffic
from .training_panel import number

LOSS = Scale(number, from_zero=False)
SECONDS = Scale(milliseconds)
COUNT = Scale("{:,.0f}".format, are_counts=True)


@dataclass(frozen=True)
class Look:
    """The input of a report. ``commits`` are those on the disk, newest first: step, created, bytes."""

    name: str
    history: History
    commits: Sequence[dict[str, Any]]
    drive: Drive | None
    step_seconds: float | None
    """The predicted seconds of a step, from the caller."""
    now: float


def document(look: Look) -> dict[str, Any]:
    """Return the content of the page as plain data."""
    history = look.history
    return {
        "run": look.name,
        "state": facts.state_of(history, look.now),
        "sittings": [sitting.about | {"kind": sitting.kind} for sitting in history.sittings],
        "times": facts.times(history.line()),
        "losses": [[step.step, step.loss] for step in history.line() if step.loss is not None],
        "validations": history.validations,
        "lanes": facts.lanes(history),
        "traffic": facts.traffic(history),
        "memory": facts.memory(history),
        "predictions": facts.predictions(history, look.step_seconds),
        "speed_of_light": facts.speed_of_light(history),
        "durability": facts.durability(history),
        "cadence": facts.cadence(history),
        "commits": list(look.commits),
        "life": facts.life(history, look.drive),
        "lines_not_understood": history.num_unreadable,
    }


def html(look: Look) -> str:
    """Return the page."""
    history = look.history
    sections = [
        Section("Loss", _loss(history)),
        Section("Time of a step", _times(look)),
        Section("One step by lane", _lanes(history)),
        Section("Traffic against formulas", traffic(history)),
        Section("Memory against budget", memory(history)),
        Section("Predicted and measured", predictions(look.history, look.step_seconds)),
        Section("Commits and what a power cut would take", _durability(look)),
        Section("What was written, and the life of the SSD", _life(look)),
        Section("What happened", happened(history)),
    ]
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(look.now))
    count = history.num_unreadable
    unread = f" {counted(count, 'line')} of the log could not be understood." * bool(count)
    foot = f"Made at {made} from {look.name}/events.jsonl. Only what was measured is shown.{unread}"
    return page(look.name, subtitle(history), _tiles(look), sections, foot)


def subtitle(history: History) -> str:
    """Describe the kind of run."""
    if not history.sittings:
        return "A run of which nothing was logged."
    newest = history.sittings[-1]
    about, times = newest.about, counted(len(history.sittings), "sitting")
    if newest.kind == "engine":
        return (
            f"Out of core: {about['parameters']:,} parameters in {counted(about['blocks'], 'block')},"
            f" {format_bytes(about['state_bytes'])} of training state; computed on {about['device']}; {times}."
        )
    if newest.kind == "checkpointer":
        ranks = f", {about['ranks']} ranks, of which the first is shown" if about["ranks"] > 1 else ""
        how = "a replica in host memory" if about["replica"] else f"records of codec {about['codec']}"
        return f"A training loop in memory under a Checkpointer, with {how}{ranks}; {times}."
    return f"A run whose log does not say how it was opened; {times}."


def _tiles(look: Look) -> list[tuple[str, str]]:
    history = look.history
    line, durable, life = history.line(), facts.durability(history), facts.life(history, look.drive)
    times, losses = facts.times(line), [step.loss for step in line if step.loss is not None]
    tiles = [("state", facts.state_of(history, look.now))]
    if line:
        tiles += [("steps done", f"{line[-1].step:,}"), ("durable step", f"{durable['durable_step']:,}")]
        tiles += [("time of a step", milliseconds(times["median_seconds"]))]
    tiles += [("loss", number(losses[-1]))] if losses else []
    tiles += (
        [("tokens per second", f"{times['tokens_per_second']:,.0f}")]
        if times.get("tokens_per_second")
        else []
    )
    light = facts.speed_of_light(history)
    tiles += [("speed of light", facts.describe_speed_of_light(light)[0])] if light else []
    tiles += [("written", format_bytes(life["written_bytes"]))] if life["written_bytes"] is not None else []
    return tiles


def _loss(history: History) -> str:
    line = history.line()
    points = [(step.step, step.loss) for step in line if step.loss is not None]
    sees_none = any(sitting.kind == "checkpointer" for sitting in history.sittings)
    not_finite = [] if sees_none else [step.step for step in line if step.loss is None and not step.skipped]
    if not points:
        return absent(
            "No losses were logged: a Checkpointer does not see them. What the training script logs elsewhere has them."
            if sees_none
            else _not_finite(not_finite, "loss") or "No step has been logged yet."
        )
    curves = [Curve("loss", points)]
    first, last = line[0].step, line[-1].step
    held_out = [point for point in history.validations if first - 1 <= point[0] <= last]
    dots = [(step, loss) for step, loss in held_out if loss is not None]
    curves += [Curve("loss on held-out text", dots, "b", dots=True)] if dots else []
    skipped = [step for step in line if step.skipped]
    said = [
        f"From {number(points[0][1])} at step {points[0][0]:,} to {number(points[-1][1])} at step {points[-1][0]:,}.",
        _not_finite(not_finite, "loss"),
        _not_finite([step for step, loss in held_out if loss is None], "loss on held-out text"),
    ]
    if skipped:
        last = skipped[-1]
        steps = counted(len(skipped), "step")
        said.append(f"{steps} changed nothing, the last one step {last.step:,}: {last.skipped}.")
    return paragraph(" ".join(filter(None, said))) + chart(curves, LOSS)


def _not_finite(steps: Sequence[int], what: str) -> str:
    """Return a sentence on ``steps`` whose ``what`` is not finite, so that the chart lacks them; "" for none."""
    if not steps:
        return ""
    return f"Not drawn: the {what} was not finite at {counted(len(steps), 'step')}, the last one step {steps[-1]:,}."


def _times(look: Look) -> str:
    line = look.history.line()
    if not line:
        return absent("No step has been logged yet.")
    times = facts.times(line)
    said = f"The median is {milliseconds(times['median_seconds'])}"
    if len(line) >= 20:
        said += f", one in twenty takes {milliseconds(times['p95_seconds'])} or more"
    tokens = times["tokens_per_second"]
    said += f"; {tokens:,.0f} tokens per second." if tokens else "; tokens are not known."
    curves = [Curve("time of a step", [(step.step, step.seconds) for step in line])]
    stalls = [(step.step, step.stall_seconds) for step in line if step.stall_seconds is not None]
    if stalls:
        curves.append(Curve("of it, what keeping the step took", stalls, "b"))
        said += (
            f" Keeping the steps took {times['stall_share']:.1%} of the time, at the longest"
            f" {milliseconds(times['longest_stall_seconds'])} at once."
        )
    if any(step.steps > 1 for step in line):
        said += " Short steps are logged together, once a second; their times are means."
    planned = facts.planned(look.history)
    seconds = look.step_seconds or (planned.plan["step_seconds"] if planned else None)
    levels = [Level("predicted", seconds, "predicted")] if seconds else []
    return paragraph(said) + chart(curves, SECONDS, levels)


def _lanes(history: History) -> str:
    timeline = history.timeline
    if timeline is None:
        if history.sittings and history.sittings[-1].kind == "checkpointer":
            return absent(
                "There are no lanes: the training loop is the script's own, and only its ends of steps are seen."
            )
        return absent(
            "No step was recorded: an engine records the first and the third step of a sitting, and every thousandth,"
            " and writes them when the step after is over."
        )
    said = (
        "It is the first of a sitting, without a step before it: all of it is counted, to the end of its commit."
        if timeline.is_first
        else f"Counted until step() returned after {milliseconds(timeline.seconds)}; updates and the commit go on"
        " beside the next step, and those of the step before it ran beside this one."
    )
    busy, waits = timeline.busy, timeline.waits
    rows = [
        [
            NAMES[lane],
            milliseconds(seconds),
            f"{seconds / timeline.window:.0%}",
            milliseconds(waits.get(lane, 0.0)),
        ]
        for lane, seconds in busy.items()
    ]
    columns = ["lane", ">busy", ">of the step", ">computing waited for it"]
    return (
        paragraph(timeline.verdict(), "verdict")
        + paragraph(
            f"Step {timeline.step:,}. {said} A transfer is counted from when it was asked for.", "soft"
        )
        + gantt(timeline)
        + table(columns, rows)
    )


def _durability(look: Look) -> str:
    found, line = facts.durability(look.history), look.history.line()
    parts = []
    if line:
        parts.append(
            paragraph(
                f"Step {found['durable_step']:,} of {found['step']:,} survives a power cut. While training,"
                f" {found['mean_lag_steps']:.1f} steps were on their way on the average, and"
                f" {found['longest_lag_steps']:,} at most."
            )
        )
        if (chosen := facts.cadence(look.history)) is not None:
            parts.append(paragraph(f"Chosen at step {chosen['step']:,}: {chosen.get('why', '')}"))
        points = [(step.step, float(step.lag)) for step in line]
        parts.append(chart([Curve("steps that are not durable", points)], COUNT))
    else:
        parts.append(absent("No step has been logged yet."))
    if look.commits:
        rows = [
            [f"{commit['step']:,}", _clock(commit["created"]), format_bytes(commit["bytes"])]
            for commit in look.commits[:10]
        ]
        parts += [
            paragraph(f"On the disk now: {counted(len(look.commits), 'commit')}."),
            table([">step", "written", ">size"], rows),
        ]
    else:
        parts.append(absent("No commit was found beside the log."))
    return "".join(parts)


def _life(look: Look) -> str:
    found = facts.life(look.history, look.drive)
    parts = []
    if found["written_bytes"] is None:
        parts.append(
            absent("The log does not say what was written: a replica writes the run, or no step was logged.")
        )
    else:
        each, steps = found["bytes_per_step"], found["steps_of_a_life"]
        said = (
            f"This run has written {format_bytes(found['written_bytes'])} in {counted(found['sittings'], 'sitting')}:"
            f" {percent(found['rated_share'])} of what a drive rated for {found['rated_bytes'] // 10**12} TB takes."
        )
        said += f" At {format_bytes(each)} a step that lasts {steps:,.0f} steps." if each else ""
        parts.append(paragraph(said))
        if found["sittings_not_closed"]:
            parts.append(
                paragraph(
                    f"{counted(found['sittings_not_closed'], 'sitting')} did not end in order, or not yet: of such only"
                    " what their steps say is counted, without the setting up.",
                    "soft",
                )
            )
    drive = found["drive"]
    if drive is None:
        parts.append(
            absent(
                "The drive's own counters are not there: the directory is on no drive that this system counts."
            )
        )
    else:
        parts.append(
            paragraph(
                f"The drive {drive['name']} was written {format_bytes(drive['written_bytes'])} and read"
                f" {format_bytes(drive['read_bytes'])} by everybody since this machine was started."
            )
        )
    return "".join(parts)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
