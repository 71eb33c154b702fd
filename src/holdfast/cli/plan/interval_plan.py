"""The verb ``plan --cadence``: how often to write a snapshot, and why, from numbers alone.

Nothing is read or written. It minimises the same waste as the ``Tuner`` of a run, and says which limits bind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from math import ceil, inf
from typing import Any

from ...errors import ConfigError
from ...quantities import counted, format_bytes, format_seconds, parse_bytes, parse_seconds
from ...schedule.interval.snapshot_interval import MOST_STEPS, Limits, Optimum, bounds, optimum, storage_cap
from ...schedule.interval.step_cadence import CadenceChoice, StepRates, choose
from ...schedule.interval.tuner import BASE_BYTES_PER_STEP, COPY_BYTES_PER_SECOND
from ...schedule.interval.waste import (
    HOUR,
    MeasuredCosts,
    closed_form,
    host_bytes,
    pace,
    recovery_seconds,
    storage_bytes,
    waste,
)
from ..output import console, parsed, plain_table, print_facts, print_json, print_table
from .placing import plan_placement

NEEDED = ("step_seconds", "full_bytes", "write_bytes_per_second")
TERMS = {
    "lost": "steps done that were not durable yet",
    "restart": "from the failure to the load",
    "load": "reading the base",
    "replay": "applying the records since",
    "base_stall": "training waits for bases, failures or not",
    "record_stall": "training waits for records, failures or not",
    "contention": "training is slower while something is written",
}
WHAT_IT_DOES = """\
holdfast plan --cadence finds how many steps to leave between two bases, so that failures and being ready for them
cost least. It needs --step, --state and --write; what else is not given is assumed, and said. For example:

  holdfast plan --cadence --step 0.5s --state 1.5GB --record 10MB --write 1GB/s --mtbf 6h

holdfast plan --model NAME --machine NAME finds what to keep in host memory and what on the SSD, how many micro-batches
make a step, and which part of its updates to delay. It says what that takes, what binds and what would help:

  holdfast plan --model gpt-65b --machine a100-80g

`holdfast plan --help` lists what can be given."""


def plan(given: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Print the requested plan.

    Args:
        given: The options, by the fields that they set.
        flags: The names of the options, by the same fields.
    """
    if given["model"] is not None or given["machine"] is not None:
        _refuse_cadence(given, flags)
        plan_placement(given)
        return
    if not given["cadence"]:
        print(WHAT_IT_DOES)
        return
    ours = {field.name for kind in (MeasuredCosts, Limits) for field in fields(kind)}
    values = {n: _parsed(n, value, flags) for n, value in given.items() if n in ours and value is not None}
    missing = [flags[name] for name in NEEDED if name not in values]
    if missing:
        raise ConfigError(f"--cadence needs {', '.join(missing)}; `holdfast plan` shows an example")
    assumed = _assumed(values)
    try:
        measured = MeasuredCosts(**_of(MeasuredCosts, assumed | values))
        limits = Limits(**_of(Limits, values))
    except ValueError as error:
        name, _, text = str(error).partition(" ")
        raise ConfigError(f"{flags.get(name, name)} {text}") from error
    best = optimum(measured, limits)
    if given["json"]:
        print_json(_document(best, assumed))
    else:
        _print(best, assumed)


def _refuse_cadence(given: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for options of the other plan beside --model, which would have no effect."""
    ours = [f.name for kind in (MeasuredCosts, Limits) for f in fields(kind) if f.name != "retain"]
    wrong = [flags[name] for name in ("cadence", *ours) if given.get(name)]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} is not for a plan of a --model; `holdfast plan` shows both kinds of plan"
        )


def _parsed(name: str, value: Any, flags: Mapping[str, str]) -> Any:
    if not isinstance(value, str):
        return value
    return parsed(flags[name], parse_bytes if "bytes" in name else parse_seconds, value)


def _of(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _assumed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return guesses for quantities that were not given.

    They assume gradients of an Adam in one precision, copies at the speed of host memory, and an optimizer that takes a
    tenth of the step.
    """
    full = values["full_bytes"]
    record = values.get("record_bytes", full // 3)
    defaults = {field.name: field.default for field in fields(MeasuredCosts) if field.default is not MISSING}
    guesses = {
        "record_bytes": record,
        "read_bytes_per_second": values["write_bytes_per_second"],
        "base_stall_seconds": full / COPY_BYTES_PER_SECOND,
        "base_steps": max(1, ceil(full / BASE_BYTES_PER_STEP)),
        "record_stall_seconds": record / COPY_BYTES_PER_SECOND,
        "replay_seconds": values["step_seconds"] / 10,
    }
    known = {
        *values,
        "frozen_bytes",
        "captured_bytes",
    }  # none frozen, unless given, and rows of zeros in no record
    return {name: guess for name, guess in (defaults | guesses).items() if name not in known}


def _curve(best: Optimum) -> list[dict[str, Any]]:
    """Return the waste for snapshot intervals at factors of two around the best, and the limits that forbid each."""
    found = bounds(best.measured, best.limits)
    points = []
    for power in range(-4, 5):
        tried = max(1, round(best.steps * 2.0**power))
        if tried > MOST_STEPS or any(point["steps"] == tried for point in points):
            continue
        forbids = [b.limit for b in found if (tried < b.value if b.low else tried > b.value)]
        total = waste(best.measured, tried).total
        points.append({"steps": tried, "wasted_seconds_per_hour": total, "forbidden_by": forbids})
    return points


def _chosen(best: Optimum) -> CadenceChoice:
    """Return what ``every="auto"`` would choose with these numbers, where a copy takes what copies take in memory."""
    m = best.measured
    _, record_stall, contention = pace(m, best.steps)
    copy = m.full_bytes * (1 / COPY_BYTES_PER_SECOND + m.write_slowdown / m.write_bytes_per_second)
    return choose(m, best.limits, StepRates(m.step_seconds, m.step_seconds + record_stall + contention, copy))


def _uses(best: Optimum) -> dict[str, tuple[float, float]]:
    """Return the largest use of each limit under the best interval, and the limit."""
    m, limits, steps = best.measured, best.limits, best.steps
    rate = (m.record_bytes + m.full_bytes / steps) / m.step_seconds
    return {
        "recovery_seconds": (recovery_seconds(m, steps), limits.recovery_seconds),
        "storage_bytes": (storage_bytes(m, steps, limits.retain), storage_cap(m, limits)),
        "host_bytes": (host_bytes(m), limits.host_bytes),
        "bandwidth_share": (rate / m.write_bytes_per_second, limits.bandwidth_share),
    }


def _document(best: Optimum, assumed: Mapping[str, Any]) -> dict[str, Any]:
    steps = closed_form(best.measured)
    return {
        "steps_between_bases": best.steps,
        "base_every": best.steps,
        "auto": _chosen(best).about,
        "wasted_seconds_per_hour": asdict(best.waste) | {"total": best.waste.total},
        "binding": list(best.binding),
        "closed_form": {"steps": steps if steps < inf else None},
        "uses": {name: {"most": used, "limit": limit} for name, (used, limit) in _uses(best).items()},
        "curve": _curve(best),
        "measured": asdict(best.measured),
        "assumed": sorted(assumed),
        "limits": asdict(best.limits),
    }


def _print(best: Optimum, assumed: Mapping[str, Any]) -> None:
    out, steps, m = console(), best.steps, best.measured
    print(
        f"A base every {counted(steps, 'step')} ({format_seconds(steps * m.step_seconds)}). A base takes "
        f"{counted(m.base_steps, 'step')} to copy. A Checkpointer finds its own number, or is told: "
        f"base_every={steps}."
    )
    print(
        f"Expected waste: {best.waste.total:.1f} s of an hour, {best.waste.total / HOUR:.2%}, with a failure every "
        f"{format_seconds(m.mean_seconds_between_failures)}.\n"
    )
    terms = plain_table("", ">s/hour", "")
    for name, value in sorted(asdict(best.waste).items(), key=lambda item: -item[1]):
        terms.add_row(name.replace("_", " "), f"{value:.2f}", TERMS[name])
    print_table(out, terms)
    print()
    _print_curve(best)
    print()
    facts = {"why": _why(best), "every=auto": _chosen(best).describe()} | _uses_text(best)
    print_facts(out, facts | {"assumed": _assumed_text(assumed) or "nothing"})


def _print_curve(best: Optimum) -> None:
    table = plain_table(">steps", ">s/hour", "")
    points = _curve(best)
    most = max(point["wasted_seconds_per_hour"] for point in points)
    for point in points:
        bar = "#" * round(40 * point["wasted_seconds_per_hour"] / most) if most else ""
        forbids = f"  forbidden by: {', '.join(point['forbidden_by'])}" if point["forbidden_by"] else ""
        chosen = "  best" if point["steps"] == best.steps else ""
        table.add_row(
            f"{point['steps']:,}", f"{point['wasted_seconds_per_hour']:.1f}", f"{bar}{chosen}{forbids}"
        )
    print_table(console(), table)


def _why(best: Optimum) -> str:
    """Describe what pulls to either side, and which limits keep the two from balance."""
    now, steps = best.waste, closed_form(best.measured)
    free = f"; without limits the closed form is {steps:,.0f} steps" if steps < inf else ""
    binding = f"What binds: {', '.join(best.binding)}." if best.binding else "No limit binds."
    return (
        f"fewer bases cost more replay ({now.replay:.1f} s/hour), more of them more stall and contention "
        f"({now.base_stall + now.contention:.1f} s/hour){free}. {binding}"
    )


def _uses_text(best: Optimum) -> dict[str, str]:
    """Describe the largest use of each limit."""
    names = {"recovery_seconds": "recovery", "storage_bytes": "storage", "host_bytes": "host memory"}
    shown = {}
    for name, (used, limit) in _uses(best).items():
        form = format_seconds if "seconds" in name else format_bytes if "bytes" in name else "{:.0%}".format
        shown[names.get(name, "bandwidth")] = f"{form(used)} at most, of {form(limit)} allowed"
    shown["bandwidth"] = shown["bandwidth"].replace("at most", "on the average")
    return shown


def _assumed_text(assumed: Mapping[str, Any]) -> str:
    def form(name: str, value: float) -> str:
        if "bytes" in name:
            return format_bytes(value) + ("/s" if name.endswith("per_second") else "")
        return f"{value:.3g} s" if "seconds" in name else f"{value:g}"

    return ", ".join(f"{name.replace('_', ' ')} {form(name, value)}" for name, value in assumed.items())
