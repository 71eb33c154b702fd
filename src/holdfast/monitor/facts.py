"""The facts of a run as plain data: times, lanes, traffic, memory, durability, and wear of the drive.

Nothing is guessed: what was not measured is None or missing. The report, its JSON and the panel show the same facts, so
they are computed here once. Units are seconds and bytes. Called by ``report_tables``, ``run_report`` and ``run_panel``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from ..quantities import format_bytes
from ..schedule.operations import LANES, SSD_READ, SSD_WRITE
from ..schedule.planner.machine_rates import RESOURCE_NAMES
from .history import History, Session, StepRecord, expected
from .lanes import Timeline

RECENT = 20
"""The number of steps, or log lines of several steps, that current rates are taken over."""
CLASSES = {
    "optimizer state": ("state", "optimizer_on_host"),
    "parameters": ("params", "params_on_host"),
    "updated parameters": ("updated_params",),
    "gradients": ("grads", "kept_grads"),
    "resident state": ("resident_state",),
    "resident parameters": ("resident_working_copy", "resident_params"),
    "block inputs": ("staged_inputs",),
    "inputs": ("inputs",),
    "kept inputs": ("kept_inputs",),
    "input gradients": ("input_grads",),
    "resident gradients": ("resident_grads",),
}
"""Purposes of the engine's buffers, with the classes under which they were predicted."""
RATED_BYTES = 600 * 10**12
"""The bytes that an SSD may be written in its life: an assumption, typical of consumer drives of 1 TB."""
SECTOR = 512
"""The unit of the system's counters, in bytes, whatever the drive's own sector is."""


def times(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return how long steps took (mean, median and slowest twentieth, by lines of the log) and the stalls."""
    if not steps:
        return {}
    seconds = sorted(step.seconds for step in steps)
    total, count = sum(step.seconds * step.steps for step in steps), sum(step.steps for step in steps)
    stalls = [step for step in steps if step.stall_seconds is not None]
    tokens = [step for step in steps if step.tokens]
    found = {
        "steps": count,
        "mean_seconds": total / count,
        "median_seconds": median(seconds),
        "p95_seconds": seconds[min(len(seconds) - 1, round(0.95 * (len(seconds) - 1)))],
        "tokens_per_second": rate(tokens, "tokens"),
    }
    if stalls:
        stalled = sum((step.stall_seconds or 0.0) * step.steps for step in stalls)
        found["stall_share"] = stalled / max(sum(step.seconds * step.steps for step in stalls), 1e-12)
        found["longest_stall_seconds"] = max(step.longest_stall_seconds or 0.0 for step in stalls)
    return found


def rate(steps: Sequence[StepRecord], quantity: str) -> float | None:
    """Return ``quantity`` of ``steps`` per second; None if no step has it."""
    told = [step for step in steps if getattr(step, quantity) is not None]
    seconds = sum(step.seconds * step.steps for step in told)
    return sum(getattr(step, quantity) for step in told) / seconds if seconds else None


def recent(history: History) -> list[StepRecord]:
    """Return the last steps of the current sitting."""
    return history.sittings[-1].steps[-RECENT:] if history.sittings else []


def durability(history: History) -> dict[str, Any]:
    steps = history.line()
    if not steps:
        return {}
    durable = history.sittings[-1].closed or {}
    return {
        "step": steps[-1].step,
        "durable_step": max(durable.get("durable_step", -1), steps[-1].durable_step),
        "longest_lag_steps": max(step.lag for step in steps),
        "mean_lag_steps": sum(step.lag for step in steps) / len(steps),
    }


def cadence(history: History) -> dict[str, Any] | None:
    """Return the last choice of ``every="auto"``; None if the run has made none."""
    return next((event for event in reversed(history.other_events) if event["event"] == "every"), None)


def lanes(history: History) -> dict[str, Any] | None:
    """Return lane times of the newest recorded step: busy times, the bottleneck, and what compute waited for."""
    timeline = history.timeline
    return None if timeline is None else _lanes_of(timeline)


@lru_cache(maxsize=2)
def _lanes_of(timeline: Timeline) -> dict[str, Any]:
    return {
        "step": timeline.step,
        "seconds": timeline.seconds,
        "window_seconds": timeline.window,
        "busy_seconds": timeline.busy,
        "compute_waits_seconds": {lane or "other": seconds for lane, seconds in timeline.waits.items()},
        "verdict": timeline.verdict(),
    }


def traffic(history: History) -> dict[str, Any] | None:
    """Return the mean bytes of a step by lane and kind, as moved and as scheduled.

    None if the log has no schedule, or no step besides the first of a sitting.
    """
    found = history.last_schedule
    if found is None or not sum(found[0].shapes.values()):
        return None
    sitting, schedule = found
    count, by_schedule = sum(sitting.shapes.values()), expected(sitting)
    order = {lane: number for number, lane in enumerate(LANES)}
    keys = sorted(
        by_schedule | sitting.moved, key=lambda key: (order.get(key[0], len(order)), -by_schedule[key])
    )
    rows = [
        {
            "lane": key[0],
            "kind": key[1],
            "expected": by_schedule[key] / count,
            "moved": sitting.moved[key] / count,
        }
        for key in keys
    ]
    return {
        "steps": count,
        "schedule": schedule["schedule"],
        "micro_batches": schedule["micro_batches"],
        "order": schedule.get("order", "plain"),
        "delayed_fraction": schedule.get("delayed_fraction", 0.0),
        "recomputed_fraction": schedule.get("recomputed_fraction", 1.0),
        "tokens": _mean_tokens(sitting),
        "scheduled_tokens": _tokens_of_full_samples(history.config),
        "rows": rows,
    }


def _mean_tokens(sitting: Session) -> float | None:
    """Return the mean tokens of the steps whose traffic is counted: all but the first."""
    found = [step.tokens for step in sitting.steps[1:] if step.tokens and step.skipped is None]
    return sum(found) / len(found) if found else None


def _tokens_of_full_samples(config: dict[str, Any]) -> int | None:
    """Return the tokens of a step whose samples are all as long as the context; None if the log does not tell."""
    keys = ("train.micro_batches", "train.micro_batch_size", "model.context")
    counts = [count for key in keys if isinstance(count := config.get(key), int)]
    return prod(counts) if len(counts) == len(keys) else None


def memory(history: History) -> dict[str, Any] | None:
    """Return memory facts of the newest sitting that has some: peak, prediction, budget, and classes."""
    for sitting in reversed(history.sittings):
        if sitting.kind and sitting.steps:
            return _of_engine(sitting) if sitting.kind == "engine" else _of_checkpointer(sitting)
    return None


def _of_engine(sitting: Session) -> dict[str, Any]:
    about, predicted = sitting.about, (sitting.about.get("memory_predicted") or {}).get("host", {})
    classes = [
        {
            "class": name,
            "predicted": sum(predicted.get(kind, 0) for kind in kinds) if predicted else None,
            "measured": sitting.buffers.get(name),
        }
        for name, kinds in CLASSES.items()
    ]
    named = {kind for kinds in CLASSES.values() for kind in kinds}
    classes += [
        {"class": k.replace("_", " "), "predicted": n, "measured": None}
        for k, n in predicted.items()
        if k not in named
    ]
    return {
        "host_bytes": _most(sitting, "host_bytes"),
        "host_predicted": about.get("host_bytes_predicted"),
        "host_budget": about.get("host_budget"),
        "device_bytes": _most(sitting, "device_bytes"),
        "device_predicted": about.get("device_bytes_predicted"),
        "device_budget": about.get("device_budget"),
        "process_bytes": about.get("process_bytes"),
        "classes": [row for row in classes if row["predicted"] or row["measured"]],
    }


def _of_checkpointer(sitting: Session) -> dict[str, Any]:
    about = sitting.about
    return {
        "ring_bytes": about.get("ring_bytes"),
        "staging_bytes": about.get("staging_bytes"),
        "budget": about.get("memory"),
        "waiting_bytes": _most(sitting, "waiting_bytes"),
        "staged_bytes": _most(sitting, "staged_bytes"),
    }


def _most(sitting: Session, quantity: str) -> int | None:
    return max((n for step in sitting.steps if (n := getattr(step, quantity)) is not None), default=None)


def predictions(history: History, step_seconds: float | None) -> list[dict[str, Any]]:
    """Return all quantities that were both predicted and measured, with ``unit`` "s" or "B".

    ``step_seconds`` is a prediction from outside the log.
    """
    rows: list[dict[str, Any]] = []

    def add(what: str, unit: str, predicted: float | None, measured: float | None) -> None:
        if predicted and measured is not None:
            rows.append({"what": what, "unit": unit, "predicted": predicted, "measured": measured})

    if step_seconds is None and (sitting := planned(history)) is not None:
        usual = [s.seconds for s in sitting.steps[1:] if s.skipped is None]
        add(
            "time of a step, median of the sitting", "s", sitting.plan["step_seconds"], median(usual or [0.0])
        )
    add("time of a step, median", "s", step_seconds, times(history.line()).get("median_seconds"))
    held = memory(history) or {}
    add("host memory of the process, at most", "B", held.get("host_predicted"), held.get("host_bytes"))
    add("device memory, at most", "B", held.get("device_predicted"), held.get("device_bytes"))
    moved = traffic(history)
    for lane, what in (
        (SSD_READ, "read from the SSD in a step"),
        (SSD_WRITE, "written to the SSD in a step"),
    ):
        mine = [row for row in moved["rows"] if row["lane"] == lane] if moved else []
        add(what, "B", sum(row["expected"] for row in mine), sum(row["moved"] for row in mine))
    for event in history.other_events:
        if event["event"] == "recovered":
            took = event.get("load_seconds", 0.0) + event.get("replay_seconds", 0.0)
            add(f"recovery of step {event.get('step')}", "s", event.get("predicted_seconds"), took)
    return rows


def speed_of_light(history: History, most: int | None = None) -> dict[str, Any] | None:
    """Return how near the newest sitting came to the least time of its plan: ``share`` is that over the median step.

    The least time is what the busiest resource works for a step, by the machine's rates. None if the sitting was not
    planned by rates, or no step after the first had the planned number of micro-batches. ``most`` is the number of
    newest steps to consider.
    """
    sitting = planned(history)
    least = sitting.plan["light_seconds"] if sitting is not None else None
    if sitting is None or least is None:
        return None
    planned_count = sitting.plan.get("micro_batches")
    steps = [s for s in sitting.steps[1:] if s.skipped is None and s.micro_batches == planned_count]
    measured = median(step.seconds for step in steps[-(most or len(steps)) :]) if steps else 0.0
    if not measured:
        return None
    return {
        "share": least / measured,
        "lane": sitting.plan["busiest"],
        "light_seconds": least,
        "median_seconds": measured,
    }


def describe_speed_of_light(light: dict[str, Any]) -> tuple[str, str]:
    """Return the percentage of ``speed_of_light``, and words for what it is of.

    >>> describe_speed_of_light({"share": 0.934, "lane": "ssd"})
    ('93%', 'of the speed of light (the SSD)')
    """
    return (
        f"{light['share']:.0%}",
        f"of the speed of light ({RESOURCE_NAMES.get(light['lane'], light['lane'])})",
    )


def planned(history: History) -> Session | None:
    """Return the newest sitting, if its steps were planned and it has more than the first."""
    newest = history.sittings[-1] if history.sittings else None
    return newest if newest is not None and newest.plan and len(newest.steps) > 1 else None


def life(history: History, drive: Drive | None) -> dict[str, Any]:
    """Return the bytes written, how many steps a drive lasts at that rate, and the drive's own counters."""
    written, count = history.written_bytes, history.num_steps
    each = written / count if written and count else None
    return {
        "written_bytes": written,
        "sittings": len(history.sittings),
        "sittings_not_closed": sum(sitting.closed is None for sitting in history.sittings),
        "bytes_per_step": each,
        "rated_bytes": RATED_BYTES,
        "rated_share": None if written is None else written / RATED_BYTES,
        "steps_of_a_life": RATED_BYTES / each if each else None,
        "drive": None if drive is None else asdict(drive),
    }


def state_of(history: History, now: float) -> str:
    """Return the state of the run according to its log: "training", "closed", and so on.

    "died" means that its process was on this machine and is gone; "silent" that it has logged nothing for long.
    """
    if not history.sittings or history.last_time is None:
        return "nothing was logged yet"
    newest = history.sittings[-1]
    if newest.closed is not None:
        said = {event["event"] for event in history.other_events if _is_after(event, newest)}
        return next((word for word in ("failed", "stopped", "finished") if word in said), "closed")
    if is_gone(newest):
        return "died"
    return "training" if now - history.last_time < patience(newest) else "silent"


def _is_after(event: dict[str, Any], sitting: Session) -> bool:
    """Return whether ``event`` came after the sitting began."""
    return event.get("time", 0.0) >= sitting.about.get("time", 0.0)


def is_gone(sitting: Session) -> bool:
    """Return whether the process of a sitting ran on this machine and is gone."""
    pid, host = sitting.about.get("pid"), sitting.about.get("host")
    processes = Path("/proc")
    here = host == os.uname().nodename and (processes / "self").exists()
    return here and pid is not None and not (processes / str(pid)).exists()


def patience(sitting: Session) -> float:
    """Return the seconds without log lines after which a run counts as silent: ten steps, and at least a minute."""
    return max(60.0, 10 * (sitting.steps[-1].seconds if sitting.steps else 0.0))


@dataclass(frozen=True)
class Drive:
    """A drive of this machine, and the bytes that all processes moved since it was started."""

    name: str
    read_bytes: int
    written_bytes: int


def drive_of(path: Path, system: Path = Path("/sys")) -> Drive | None:
    """Return the drive that ``path`` is on; None if the system counts none, as on network storage."""
    try:
        device = os.stat(path).st_dev
        place = (system / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        if (place / "partition").exists():
            place = place.parent
        counters = [int(word) for word in (place / "stat").read_text().split()]
        return Drive(place.name, counters[2] * SECTOR, counters[6] * SECTOR)
    except (OSError, ValueError, IndexError):
        return None


def wear(written_bytes: int) -> str:
    """Describe what writing so many bytes means for the life of a drive.

    >>> wear(30 * 2**30)
    "30.0 GiB in all, 0.0054 % of an SSD's life if rated for 600 TB"
    """
    rated = f"{RATED_BYTES // 10**12} TB"
    share = percent(written_bytes / RATED_BYTES)
    return f"{format_bytes(written_bytes)} in all, {share} of an SSD's life if rated for {rated}"


def percent(share: float) -> str:
    """Format ``share`` with two digits, or as whole percent.

    >>> percent(0.0000537), percent(0.31)
    ('0.0054 %', '31 %')
    """
    share *= 100
    digits = max(0, 1 - math.floor(math.log10(share))) if 0 < share < 10 else 0
    precise = f"{share:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{share:.0f}"
    return f"{precise} %"
