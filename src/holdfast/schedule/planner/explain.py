"""Explanations of a plan: what binds, what more of a resource would bring, how long the SSDs live."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...quantities import GiB
from . import formulas
from .linear_program import BACKWARD, FORWARD, Solution
from .plan_search import Case, best_at
from .setting import CLIPPING

BINDS = 0.99
"""Fraction of a pass during which a lane must work for the pass to wait for it."""

MORE_HOST_BYTES = 64 * GiB

DAY = 86400.0


@dataclass(frozen=True)
class WhatIf:
    """Another machine or method with the same number of micro-batches; ``solution`` is None where nothing fits."""

    what: str
    solution: Solution | None
    gain: float
    """Tokens per second divided by those of the plan, minus 1."""


@dataclass(frozen=True)
class Life:
    """Life of the SSDs, if all that is written is what the run writes."""

    written_bytes_per_step: float
    rated_bytes: float
    steps: float
    days: float


def binding(solution: Solution) -> dict[str, list[str]]:
    """Return the lanes that each pass waits for."""
    totals = {FORWARD: solution.forward_seconds, BACKWARD: solution.backward_seconds}
    return {
        name: [lane for lane, seconds in solution.lane_seconds.items() if seconds[i] >= BINDS * totals[name]]
        for i, name in enumerate(totals)
    }


def memory_is_full(solution: Solution) -> bool:
    """Return whether the plan takes all of the host memory."""
    return solution.of(formulas.host_bytes) >= 0.999 * solution.setting.machine.host_memory_bytes


def what_if(case: Case, best: Solution) -> list[WhatIf]:
    """Return the effect of more host memory, one more SSD, and other ways to clip, each by itself."""
    machine, method = case.machine, case.method
    cases = {
        "64 GiB more host memory": replace(case, machine=machine.with_more(host_bytes=MORE_HOST_BYTES)),
        "one more SSD": replace(case, machine=machine.with_more(ssds=1)),
    }
    # a wrong guess is undone from the commit of the step before
    left_out = {method.clipping, "per_block", *(["speculate"] if method.commit_every != 1 else [])}
    for clipping in CLIPPING:
        if clipping not in left_out:
            cases[f"clipping: {clipping}"] = replace(case, method=replace(method, clipping=clipping))
    if method.commit_every and method.clipping != "speculate":
        cases["no commits"] = replace(case, method=replace(method, commit_every=0))
    count = best.setting.micro_batches
    return [_change(what, best_at(other, count), best) for what, other in cases.items()]


def life(solution: Solution) -> Life:
    """Return how long the SSDs live."""
    machine, written = solution.setting.machine, solution.of(formulas.written_bytes)
    rated = machine.ssd_count * machine.ssd_rated_bytes
    steps = rated / written if written else float("inf")
    return Life(written, rated, steps, steps * solution.step_seconds / DAY)


def _change(what: str, solution: Solution | None, best: Solution) -> WhatIf:
    gain = solution.tokens_per_second / best.tokens_per_second - 1 if solution else -1.0
    return WhatIf(what, solution, gain)
