"""The linear program that says what stays in host memory, for given micro-batches and delayed fraction.

It minimises the seconds per block, forward and backward, such that each lane has the time for its work and everything
held fits. HiGHS solves it, and is imported only when needed; code that only evaluates the formulas does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from ...errors import DoesNotFit
from ...libraries import library
from ...quantities import format_bytes
from ..work import LEAST_MEMORY, MEMORY_SAVINGS, MemorySaving
from . import formulas
from .formulas import FRACTIONS, RECYCLED
from .training_setting import Affine, Setting

FORWARD, BACKWARD = "forward_seconds", "backward_seconds"
UNKNOWNS = (*FRACTIONS, RECYCLED, FORWARD, BACKWARD)
CLOSE = 1e-7
"""Relative loss of seconds that the second solution may have against the first."""


@dataclass(frozen=True)
class Solution:
    """A setting with the fractions that stay in host memory."""

    setting: Setting
    fractions: Mapping[str, float]
    """Fractions on the host, and ``RECYCLED``."""

    @cached_property
    def lane_seconds(self) -> dict[str, tuple[float, float]]:
        """Seconds that each lane works for one block, forward and backward."""
        forward, backward = (
            formulas.lanes(self.setting, phase(self.setting))
            for phase in (formulas.forward, formulas.backward)
        )

        def slowest(rows: Sequence[Affine]) -> float:
            return max(row(self.fractions) for row in rows)

        return {name: (slowest(forward[name]), slowest(backward[name])) for name in forward}

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward pass of one block."""
        return max(forward for forward, _ in self.lane_seconds.values())

    @property
    def backward_seconds(self) -> float:
        """Seconds of the backward pass of one block."""
        return max(backward for _, backward in self.lane_seconds.values())

    @property
    def step_seconds(self) -> float:
        blocks = self.setting.blocks * (self.forward_seconds + self.backward_seconds)
        return blocks + formulas.other_seconds(self.setting)

    @property
    def tokens_per_second(self) -> float:
        return self.setting.tokens / self.step_seconds

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Seconds that each lane works for a whole step."""
        s = self.setting
        busy = {name: s.blocks * sum(seconds) for name, seconds in self.lane_seconds.items()}
        busy[formulas.COMPUTE] += s.micro_batches * s.head_seconds
        return busy

    @property
    def busiest(self) -> str:
        return max(self.busy_seconds, key=self.busy_seconds.__getitem__)

    @property
    def speed_of_light(self) -> float:
        """Fraction of a step's time for which the busiest lane works: 1 if it never waits."""
        return self.busy_seconds[self.busiest] / self.step_seconds

    def of(self, formula: Any) -> float:
        """Evaluate a formula of ``formulas`` at this solution."""
        found = formula(self.setting)
        return found(self.fractions) if isinstance(found, Affine) else found


def load_highs() -> Any:
    """Import and return HiGHS. Raises ``BadInput`` if it is not installed."""
    way_out = (
        "pip install 'holdfast[plan]'; or give `holdfast simulate` fractions: --params-on-host 1 --optimizer-on-host 0"
        " --activations-on-host 1"
    )
    return library("highspy", "placement by a linear program", way_out)


def solve(setting: Setting, stated: Mapping[str, float] | None = None) -> Solution | None:
    """Return the best placement, or None if there is none; ``stated`` fractions are fixed.

    Of placements that take the same time, it is the one that wears the SSDs least. Time is spent for memory only where
    there is no placement otherwise.
    """
    for saving in savings(setting):
        found = _solve(replace(setting, saving=saving), stated)
        if found is not None:
            return found
    return None


def savings(setting: Setting) -> list[MemorySaving]:
    """Return the savings with which the setting fits a separate device; all if it fits with none of them."""
    every = [each for each in MEMORY_SAVINGS if each.keeps_copies or setting.method.is_split]
    machine = setting.machine
    if machine.device_shares_host:
        return list(dict.fromkeys(replace(each, inputs_stay=True) for each in every))
    every = [each for each in every if each.loads_ahead]
    needs = [formulas.device_bytes(replace(setting, saving=each)) for each in every]
    return [e for e, needed in zip(every, needs) if needed <= machine.device_memory_bytes] or every


def why_none(setting: Setting) -> DoesNotFit:
    """Return the error for a setting without a placement.

    It names what is too small even if everything that can be is elsewhere.
    """
    s, machine = replace(setting, saving=LEAST_MEMORY), setting.machine
    for needed, have, what, help_ in (
        (_unpaid(formulas.host_bytes(s)), machine.host_memory_bytes, "of host memory", "more of it (--host)"),
        (formulas.ssd_bytes(s), _capacity(s), "on the SSDs", "more or larger SSDs (--ssds), or --retain 1"),
        (
            formulas.written_bytes(s),
            _most_written(s),
            "written per step",
            "fewer commits, or fewer steps (--ssd-steps)",
        ),
    ):
        least = needed.least
        if least > have:
            return DoesNotFit(
                f"no placement works: at least {format_bytes(least)} {what} are needed, and there are "
                f"{format_bytes(have)}. It takes {help_}; fewer or smaller micro-batches need less."
            )
    return DoesNotFit(
        f"no placement works with {s.micro_batches} micro-batches and a delayed fraction of {s.delayed_fraction:g}: "
        f"host memory ({format_bytes(machine.host_memory_bytes)}), the SSDs ({format_bytes(_capacity(s))}) and the "
        "bytes written per step do not allow it together. More of one of them, or other --micro-batches, may."
    )


# -- helpers ----------------------------------------------------------------------------------------


def _solve(setting: Setting, stated: Mapping[str, float] | None) -> Solution | None:
    rows, given = _rows(setting), dict(stated or {})
    free = _run(rows, {FORWARD: 1.0, BACKWARD: 1.0}, given)
    if free is None:
        return None
    seconds = free[FORWARD] + free[BACKWARD]
    no_slower = Affine.of(FORWARD) + Affine.of(BACKWARD) - seconds * (1 + CLOSE)
    settled = _run([*rows, no_slower], _second_cost(setting), given) or free
    return Solution(setting, {name: min(max(0.0, settled[name]), 1.0) for name in (*FRACTIONS, RECYCLED)})


def _rows(s: Setting) -> list[Affine]:
    """Return the rows of the program, each of which must be at most 0."""
    waits, rows = formulas.waiting_bytes(s), []
    for seconds, phase in ((FORWARD, formulas.forward(s)), (BACKWARD, formulas.backward(s))):
        rows += [row - Affine.of(seconds) for lane in formulas.lanes(s, phase).values() for row in lane]
    rows += [
        formulas.host_bytes(s) - s.machine.host_memory_bytes,
        formulas.ssd_bytes(s) - _capacity(s),
        waits * Affine.of(RECYCLED) - formulas.dead_bytes(s),
        Affine.of(RECYCLED) - Affine.of("gradients"),
    ]
    if s.method.least_steps:
        rows.append(formulas.written_bytes(s) - _most_written(s))
    return rows


def _second_cost(s: Setting) -> Mapping[str, float]:
    """Return the cost to minimise among equally fast placements.

    It counts the bytes written, and those read at a hundredth of that.
    """
    moved = formulas.written_bytes(s) + 0.01 * formulas.read_bytes(s)
    most = max((abs(value) for value in moved.terms.values()), default=0.0)
    return (moved / most).terms if most else {}


def _unpaid(host_bytes: Affine) -> Affine:
    """Return host memory without what waits in dead buffers: gradients that do not wait in memory need none."""
    return Affine(host_bytes.constant, {k: v for k, v in host_bytes.terms.items() if k != RECYCLED})


def _capacity(s: Setting) -> float:
    return s.machine.ssd_count * s.machine.ssd_capacity_bytes


def _most_written(s: Setting) -> float:
    """Return the most bytes that one step may write, for the SSDs to live as long as they must."""
    rated = s.machine.ssd_count * s.machine.ssd_rated_bytes
    return rated / s.method.least_steps if s.method.least_steps else inf


def _run(
    rows: Sequence[Affine], cost: Mapping[str, float], given: Mapping[str, float]
) -> dict[str, float] | None:
    """Minimise ``cost`` with every row at most 0 and the values in ``given`` fixed.

    Returns the values of the unknowns; None if there are none that fit.
    """
    highs = load_highs()
    program = highs.HighsLp()
    program.num_col_, program.num_row_ = len(UNKNOWNS), len(rows)
    program.col_cost_ = [cost.get(name, 0.0) for name in UNKNOWNS]
    program.col_lower_ = [given.get(name, 0.0) for name in UNKNOWNS]
    program.col_upper_ = [inf if name in (FORWARD, BACKWARD) else given.get(name, 1.0) for name in UNKNOWNS]
    scaled = [
        row / max((abs(v) for v in row.terms.values()), default=1.0) if any(row.terms.values()) else row
        for row in rows
    ]
    program.row_lower_ = [-inf] * len(rows)
    program.row_upper_ = [-row.constant for row in scaled]
    program.a_matrix_.format_ = highs.MatrixFormat.kRowwise
    entries = [
        [(i, row.terms[name]) for i, name in enumerate(UNKNOWNS) if row.terms.get(name)] for row in scaled
    ]
    starts = [0]
    for entry in entries:
        starts.append(starts[-1] + len(entry))
    program.a_matrix_.start_ = starts
    program.a_matrix_.index_ = [i for entry in entries for i, _ in entry]
    program.a_matrix_.value_ = [value for entry in entries for _, value in entry]
    solver = highs.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("presolve", "off")
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highs.HighsModelStatus.kOptimal:
        return None
    return dict(zip(UNKNOWNS, solver.getSolution().col_value))
