"""The search for the number of micro-batches and the delayed fraction, and explanations of the plan that is found.

More micro-batches hide more I/O behind computing, up to a point. Of the counts within ``ENOUGH`` of the best, the
smallest is chosen, because it changes the training least. Each count is solved by the linear program. An explanation
says which lane binds, what more of a resource would bring, and how long the SSDs live. Called by ``holdfast plan``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import DoesNotFit
from ...garbage import without_collection
from ...profiles import AdaptedModel, MachineProfile, ModelProfile
from ...quantities import GiB, format_bytes
from ..work import LEAST_MEMORY
from . import formulas
from .linear_program import BACKWARD, FORWARD, Solution, solve, why_none
from .training_setting import CLIPPING, Method, Setting

MOST_MICRO_BATCHES = 64
ENOUGH = 0.99
"""Fraction of the best count's tokens per second that is enough."""
PATIENCE = 20
"""Counts tried after tokens per second have grown by less than 1 %."""
COARSE, FINE = 20, 5
"""Delayed fractions are tried in steps of a twentieth, then in steps of a fifth of that around the best."""
SAME = 1e-3
"""Relative difference of step times below which the smaller delayed fraction is taken."""


@without_collection()
def search(
    case: Case,
    micro_batches: int | None = None,
    *,
    delayed: float | None = None,
    most: int = MOST_MICRO_BATCHES,
) -> Found:
    """Return the plan for ``case``; ``micro_batches`` and ``delayed`` are chosen unless given.

    Raises ``DoesNotFit``, naming what is too small, if nothing fits.
    """
    check_device(case.setting(micro_batches or 1))
    if micro_batches is not None:
        best = best_at(case, micro_batches, delayed)
        if best is None:
            raise why_none(case.setting(micro_batches, delayed or 0.0))
        return Found(case, (best,), best)
    tried = tuple(_until_it_stops_growing(case, delayed, most))
    if not tried:
        raise why_none(case.setting(1, delayed or 0.0))
    highest = max(solution.tokens_per_second for solution in tried)
    count = next(s.setting.micro_batches for s in tried if s.tokens_per_second >= ENOUGH * highest)
    best = best_at(case, count, delayed)
    assert best is not None
    return Found(case, tried, best)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The planning problem: everything but the number of micro-batches and the delayed fraction."""

    machine: MachineProfile
    model: ModelProfile | AdaptedModel
    method: Method

    def setting(self, micro_batches: int, delayed_fraction: float = 0.0) -> Setting:
        return Setting(
            machine=self.machine,
            model=self.model,
            method=self.method,
            micro_batches=micro_batches,
            delayed_fraction=delayed_fraction if self.method.delayed is None else self.method.delayed,
        )


@dataclass(frozen=True)
class Found:
    """The best solution for each number of micro-batches that was tried, and the chosen one."""

    case: Case
    tried: tuple[Solution, ...]
    best: Solution


def best_at(case: Case, micro_batches: int, delayed: float | None = None) -> Solution | None:
    """Return the best placement and delayed fraction for ``micro_batches``; None if nothing fits."""
    if delayed is not None or case.method.delayed is not None:
        return solve(case.setting(micro_batches, delayed or 0.0))
    coarse = _coarse(case, micro_batches)
    if coarse is None:
        return None
    middle, step = coarse.setting.delayed_fraction, 1 / (COARSE * FINE)
    near = [round(middle + k * step, 9) for k in range(-FINE + 1, FINE)]
    fine = [solve(case.setting(micro_batches, part)) for part in near if 0 <= part <= 1]
    return _best([s for s in fine if s is not None])


def check_device(setting: Setting) -> None:
    """Raise ``DoesNotFit`` if a block and a micro-batch are too large for the device's own memory."""
    if _fits_device(setting):
        return
    machine, model, needed = setting.machine, setting.model, _least_device_bytes(setting)
    smaller = "--micro-batch-size" if model.micro_batch > 1 else "--sequence"
    raise DoesNotFit(
        f"two blocks' parameters, one's gradients and one micro-batch of {model.micro_batch} x {model.sequence} tokens "
        f"take about {format_bytes(needed)} of the device's memory, and it has "
        f"{format_bytes(machine.device_memory_bytes)}. Give a smaller {smaller}."
    )


def streamed_where_needed(case: Case) -> Case:
    """Return ``case``, with embedding and head streamed if the device could not hold them and a block otherwise."""
    streamed = replace(case, method=replace(case.method, streams_all=True))
    refused = (
        case.method.order == "snake" or case.method.clipping == "per_block"
    )  # numbers would depend on it
    if refused or not case.model.table_parameters or _fits_device(case.setting(1)):
        return case
    return streamed if _fits_device(streamed.setting(1)) else case


# -- helpers ----------------------------------------------------------------------------------------


def _least_device_bytes(setting: Setting) -> float:
    return formulas.device_bytes(replace(setting, saving=LEAST_MEMORY))


def _fits_device(setting: Setting) -> bool:
    machine = setting.machine
    return machine.device_shares_host or _least_device_bytes(setting) <= machine.device_memory_bytes


def _until_it_stops_growing(case: Case, delayed: float | None, most: int) -> Iterator[Solution]:
    highest, since = 0.0, 0
    for count in range(1, most + 1):
        if count > 1 and not _fits_device(case.setting(count)):
            return
        if delayed is None and case.method.delayed is None:
            found = _coarse(case, count)
        else:
            found = solve(case.setting(count, delayed or 0.0))
        if found is None:
            return
        yield found
        since = 0 if found.tokens_per_second > 1.01 * highest else since + 1
        highest = max(highest, found.tokens_per_second)
        if since >= PATIENCE:
            return


def _coarse(case: Case, micro_batches: int) -> Solution | None:
    found = [solve(case.setting(micro_batches, k / COARSE)) for k in range(COARSE + 1)]
    return _best([s for s in found if s is not None])


def _best(solutions: list[Solution]) -> Solution | None:
    """Return the fastest solution, and of equally fast ones the one that delays least."""
    if not solutions:
        return None
    fastest = min(s.step_seconds for s in solutions)
    return next(s for s in solutions if s.step_seconds <= fastest * (1 + SAME))


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
