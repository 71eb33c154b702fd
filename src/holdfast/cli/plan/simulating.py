"""The verb ``simulate``: play a plan's operations beside those of ordinary accumulation on the same machine.

Both orders are the lists that an engine would run, so what is simulated is what would be executed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BadInput
from ...garbage import without_collection
from ...quantities import format_bytes, format_seconds
from ...schedule.horizontal import horizontal
from ...schedule.memory_use import MakesOps
from ...schedule.operation_lists import EVALUATION_BATCHES, fit, host_bytes, play, shape_of, work_of
from ...schedule.planner.formulas import PROCESS_BYTES
from ...schedule.planner.placement import choose
from ...schedule.planner.placement_search import has_highs
from ...schedule.planner.plan_search import Case, check_device, search
from ...schedule.planner.training_setting import Setting
from ...schedule.simulate import Simulation, busy_columns, chrome_trace, text_timeline, window
from ...schedule.vertical import vertical
from ...schedule.work import BlockPlacement
from ..output import console, plain_table, print_json, print_table, refuse_no_directory
from .placing import ON_HOST, case_of, rate_text

ORDERS: dict[str, MakesOps] = {"vertical": vertical, "horizontal": horizontal}
COLUMNS = 72
"""The width of a timeline in columns."""


@dataclass(frozen=True)
class SimulatedOrder:
    """One order, with its placement."""

    placement: BlockPlacement
    host_bytes: int
    """The memory of the whole process."""
    found: Simulation
    tokens: int
    """The tokens of one step."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.found.seconds_per_step


@without_collection()
def simulate(given: Mapping[str, Any]) -> None:
    """Print the simulated steps of both orders."""
    refuse_no_directory("--trace", given["trace"])
    case = case_of(given)
    setting = case.setting(_count(case, given))
    check_device(setting)
    played = {
        name: _play(setting, schedule, _place(case, setting, schedule, given), given["steps"])
        for name, schedule in ORDERS.items()
    }
    if given["trace"] is not None:
        trace = chrome_trace({name: run.found for name, run in played.items()})
        given["trace"].write_text(json.dumps(trace))
    if given["json"]:
        print_json(_document(setting, played))
    else:
        _print(setting, played, given["trace"])


# -- helpers ----------------------------------------------------------------------------------------


def _count(case: Case, given: Mapping[str, Any]) -> int:
    """Return the number of micro-batches: the given one, or the plan's."""
    if given["micro_batches"] is not None:
        return given["micro_batches"]
    try:
        return search(case, delayed=case.method.delayed or 0.0).best.setting.micro_batches
    except BadInput as error:
        raise type(error)(f"--micro-batches was not given, and could not be chosen: {error}") from error


def _place(case: Case, setting: Setting, schedule: MakesOps, given: Mapping[str, Any]) -> BlockPlacement:
    """Return the placement of an order.

    Given fractions count first, then the plan for the vertical order, else a greedy choice of what saves most per byte.
    """
    stated = {kind: given[f"{kind}_on_host"] for kind in ON_HOST if given[f"{kind}_on_host"] is not None}
    if schedule is vertical and not stated:
        if has_highs():
            return fit(case, setting.micro_batches)[1]
        warnings.warn(
            "the package highspy is not there (pip install 'holdfast[plan]'), so placement is by what saves "
            "most per byte, which is not the best",
            stacklevel=2,
        )
    asked = {kind: stated.get(kind, "auto") for kind in ON_HOST}
    return choose(
        work_of(setting),
        shape_of(setting),
        setting.machine.host_memory_bytes,
        schedule=schedule,
        evaluation_batches=EVALUATION_BATCHES,
        held_bytes=PROCESS_BYTES,
        **asked,
    )


def _play(setting: Setting, schedule: MakesOps, placement: BlockPlacement, steps: int) -> SimulatedOrder:
    found = play(setting, placement, schedule, steps)
    return SimulatedOrder(placement, host_bytes(setting, placement, schedule), found, setting.tokens)


def _document(setting: Setting, played: Mapping[str, SimulatedOrder]) -> dict[str, Any]:
    vertical_, horizontal_ = played["vertical"], played["horizontal"]
    return {
        "model": setting.model.description,
        "machine": setting.machine.description,
        "micro_batches": setting.micro_batches,
        "clipping": setting.method.clipping,
        "delayed_fraction": setting.delayed_fraction,
        "orders": {name: _order_document(run) for name, run in played.items()},
        "speedup": vertical_.tokens_per_second / horizontal_.tokens_per_second,
    }


def _order_document(run: SimulatedOrder) -> dict[str, Any]:
    lane, seconds = run.found.busiest()
    start, stop = window(run.found)
    return {
        "on_host": run.placement.shares,
        "step_seconds": run.found.seconds_per_step,
        "tokens_per_second": run.tokens_per_second,
        "busiest_lane": lane,
        "busiest_seconds": seconds,
        "busy_seconds": run.found.busy_seconds(),
        "moved_bytes": {f"{lane} {kind}": moved for (lane, kind), moved in run.found.traffic().items()},
        "host_bytes": run.host_bytes,
        "device_bytes": run.found.peak.get("device", 0),
        "timeline": {"from": start, "to": stop, "busy": busy_columns(run.found, COLUMNS)},
    }


def _print(setting: Setting, played: Mapping[str, SimulatedOrder], trace: Path | None) -> None:
    model, out = setting.model, console()
    print(f"{model.description} on {setting.machine.description}")
    print(
        f"{setting.micro_batches} x {model.micro_batch} x {model.sequence:,} tokens a step, clipping: "
        f"{setting.method.clipping}. Delayed fraction {setting.delayed_fraction:g}, {setting.method.order} order.\n"
    )
    table = plain_table(
        "order", ">step", ">tokens/s", "busiest lane", ">host memory", "params, state, inputs on host"
    )
    for name, run in played.items():
        lane, _ = run.found.busiest()
        shares = run.placement.shares
        stays = ", ".join(f"{shares[kind]:.0%}" for kind in ON_HOST)
        table.add_row(
            name,
            format_seconds(run.found.seconds_per_step),
            rate_text(run.tokens_per_second),
            f"{lane}, {run.found.speed_of_light:.0%} of the time",
            format_bytes(run.host_bytes),
            stays,
        )
    print_table(out, table)
    for name, run in played.items():
        start, stop = window(run.found)
        print(f"\n{name}: one step, {format_seconds(stop - start)} from left to right")
        for line in text_timeline(run.found, COLUMNS):
            out.print(f"  {line}", markup=False, soft_wrap=True)
    faster = played["vertical"].tokens_per_second / played["horizontal"].tokens_per_second
    print(f"\nVertical is {faster:.2f} times as fast as horizontal.")
    if trace is not None:
        print(f"Trace of {len(next(iter(played.values())).found.step_ends)} steps of each: {trace}")
