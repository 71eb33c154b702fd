"""Tuner: the steps from one base to the next, followed while a run goes on.

It is told what the training thread waits for, what is written and how fast, and asks ``cadence.optimum`` again when
that has changed. Pure: the clock is whoever tells it. Seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from ..errors import DoesNotFit
from ..units import GiB, MiB
from .cadence import MOST_STEPS, Limits, Optimum, bounds, optimum
from .estimates import Estimates
from .waste import HOUR, Measured

FIRST_STEPS = 100
"""From one base to the next before anything was measured. Replay takes a fraction of training, so that costs a few
steps' time after a failure, and a base that takes as long as several steps is spread over a hundred."""

WARM_STEPS = 10
"""Until a step's time is believed."""

ENOUGH = 1.07
"""By which factor the optimum must have moved for another number to be taken."""

KEEP = 0.6
"""The weight that an observation leaves to those before. Bases are rare: a machine that has changed shows in a few."""

COPY_BYTES_PER_SECOND = 4 * GiB
"""Believed of copies in host memory until one was timed."""

BASE_BYTES_PER_STEP = 64 * MiB
"""Of a base, that a Checkpointer copies at the end of one step."""

MEAN_SECONDS_BETWEEN_FAILURES = 24 * HOUR
"""Believed as firmly as one failure seen, until there are restarts."""


@dataclass(frozen=True)
class Change:
    """Another number of steps, and why."""

    steps: int
    was: int
    binding: tuple[str, ...]
    relaxed: tuple[str, ...]
    """Limits that cannot be kept, and were left out."""
    measured: Measured


class Tuner:
    """Chooses ``steps``, unless they were ``told``."""

    def __init__(self, told: int | None, limits: Limits, prior: Measured) -> None:
        self.steps = told or FIRST_STEPS
        self.limits = limits
        self._told = told is not None
        self._estimates = Estimates(prior, keep=KEEP)
        self._sizes = {"full_bytes": prior.full_bytes, "record_bytes": prior.record_bytes}
        self._replay_seen = False
        self._num_steps = self._steps_since = 0
        self._seconds = self._record_stall = 0.0
        self._asked = False

    @property
    def measured(self) -> Measured:
        """What is believed now."""
        believed = replace(self._estimates.measured, **self._sizes)
        if not self._replay_seen:  # an optimizer takes about a tenth of a step
            believed = replace(believed, replay_seconds=believed.step_seconds / 10)
        return believed

    def stepped(self, seconds: float, record_stall: float) -> None:
        """A step was trained in so many ``seconds``, besides which the training thread waited for its record."""
        self._num_steps += 1
        self._steps_since += 1
        self._seconds += max(seconds, 0.0)
        self._record_stall += record_stall
        self._estimates.ran(seconds + record_stall)
        self._asked = self._asked or self._num_steps == WARM_STEPS

    def based(self, nbytes: int, steps: int, stall: float) -> None:
        """A base of ``nbytes`` is published, for whose copies, at the ends of so many ``steps``, training waited."""
        self._sizes["full_bytes"] = nbytes
        self._estimates.saw("base_stall_seconds", stall)
        self._estimates.saw("base_steps", max(steps, 1))
        self._asked = True

    def wrote(self, nbytes: int, seconds: float) -> None:
        """So much, in so long."""
        if nbytes and seconds > 0:
            self._estimates.saw("write_bytes_per_second", nbytes, seconds)

    def replayed(self, nbytes: int, read_seconds: float, num_records: int, replay_seconds: float) -> None:
        """What a resume took."""
        if nbytes and read_seconds > 0:
            self._estimates.saw("read_bytes_per_second", nbytes, read_seconds)
        if num_records:
            self._estimates.saw("replay_seconds", replay_seconds, num_records)
            self._replay_seen = True

    def restarted(self, seconds: float, times: int) -> None:
        """Before this process the run was begun again so many ``times``, in so many ``seconds``."""
        self._estimates.ran(max(seconds, 0.0), times)

    def records_are(self, nbytes: int) -> None:
        self._sizes["record_bytes"] = nbytes

    def retuned(self) -> Change | None:
        """Another number of steps, if a base or the first steps have shown that it is better by enough."""
        if not self._asked or self._told:
            return None
        self._asked = False
        if self._steps_since:
            self._estimates.saw("step_seconds", max(self._seconds, 1e-9), self._steps_since)
            self._estimates.saw("record_stall_seconds", self._record_stall, self._steps_since)
            self._steps_since, self._seconds, self._record_stall = 0, 0.0, 0.0
        if self._num_steps < WARM_STEPS:
            return None
        measured = self.measured
        best, relaxed = self._best(measured)
        steps = _rarest(measured, self.limits) if best is None else best.cadence.steps
        if _near(steps, self.steps) and (best is None or self._allowed(best)):
            return None
        was, self.steps = self.steps, steps
        return Change(steps, was, () if best is None else best.binding, relaxed, measured)

    def _best(self, measured: Measured) -> tuple[Optimum | None, tuple[str, ...]]:
        """The optimum under as many of the limits as can be kept. Storage is kept to always."""
        for relaxed, limits in _relaxations(self.limits):
            try:
                return optimum(measured, limits), relaxed
            except DoesNotFit:
                continue
        return None, ("bandwidth share",)

    def _allowed(self, best: Optimum) -> bool:
        """Whether the present steps keep to the limits."""
        found = [bound for bound in bounds(best.measured, best.limits) if bound.axis == "steps"]
        return all(self.steps >= bound.value if bound.low else self.steps <= bound.value for bound in found)


def prior(full_bytes: int, record_bytes: int, bytes_per_step: int, write_bytes_per_second: float) -> Measured:
    """What is believed of a run of which a first base has been written and nothing else is known."""
    return Measured(
        step_seconds=1.0,
        full_bytes=full_bytes,
        record_bytes=record_bytes,
        write_bytes_per_second=write_bytes_per_second,
        read_bytes_per_second=write_bytes_per_second,
        base_stall_seconds=full_bytes / COPY_BYTES_PER_SECOND,
        base_steps=max(1, -(-full_bytes // bytes_per_step)),
        replay_seconds=0.1,
        mean_seconds_between_failures=MEAN_SECONDS_BETWEEN_FAILURES,
    )


def _rarest(measured: Measured, limits: Limits) -> int:
    """The most steps that recovery and storage allow: for a disk that records alone are too much for."""
    most = [bound.value for bound in bounds(measured, limits) if bound.axis == "steps" and not bound.low]
    return int(max(1, min(MOST_STEPS, *most)))


def _near(a: int, b: int) -> bool:
    return max(a, b) <= ENOUGH * min(a, b)


def _relaxations(limits: Limits) -> Iterator[tuple[tuple[str, ...], Limits]]:
    yield (), limits
    yield ("recovery time",), replace(limits, recovery_seconds=inf)
    yield ("bandwidth share",), replace(limits, bandwidth_share=1.0)
    yield ("recovery time", "bandwidth share"), replace(limits, recovery_seconds=inf, bandwidth_share=1.0)
