"""The tuner of the number of steps between snapshots, which follows what a run measures while it continues.

It receives how long the training thread waits, how much is written and how fast, and computes the optimum again when
that has changed. Estimates start at what is believed before anything is known, and newer observations have more weight.
Where not all limits can be kept, storage is. Pure: it reads no clock; callers pass times. Called by the snapshot
scheduler, and by the planning command for the same numbers. Seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ...errors import DoesNotFit
from ...quantities import GiB, MiB
from .snapshot_interval import MOST_STEPS, Limits, Optimum, bounds, optimum
from .waste import HOUR, MeasuredCosts

FIRST_STEPS = 100
"""Steps between snapshots before anything was measured.

Replay takes a fraction of training, so this costs a few steps' time after a failure. A snapshot that takes as long as
several steps is spread over a hundred.
"""
WARM_STEPS = 10
"""Steps until a step's time is believed."""
ENOUGH = 1.07
"""Factor by which the optimum must have moved for another number to be taken."""
KEEP = 0.6
"""Weight that an observation leaves to those before. Snapshots are rare: a changed machine shows after a few."""
COPY_BYTES_PER_SECOND = 4 * GiB
"""Rate believed of copies in host memory until one was timed."""
BASE_BYTES_PER_STEP = 64 * MiB
"""Bytes of a snapshot that a Checkpointer copies at the end of one step."""
MEAN_SECONDS_BETWEEN_FAILURES = 24 * HOUR
"""Mean time believed as firmly as one observed failure, until there are restarts."""


class Tuner:
    """Chooses ``steps``, the steps between snapshots, unless the user gave them (``told``).

    A ``mean_seconds_between_failures`` that the user gave is believed whatever restarts show.
    """

    def __init__(
        self,
        told: int | None,
        limits: Limits,
        prior: MeasuredCosts,
        mean_seconds_between_failures: float | None = None,
    ) -> None:
        self.steps = told or FIRST_STEPS
        self.limits = limits
        self._told = told is not None
        self._mean = mean_seconds_between_failures
        self._estimates = Estimates(prior)
        sizes = ("full_bytes", "frozen_bytes", "record_bytes", "captured_bytes")
        self._sizes = {name: getattr(prior, name) for name in sizes}
        self._replay_seen = False
        self._num_steps = self._steps_since = 0
        self._seconds = self._record_stall = 0.0
        self._asked = False

    @property
    def measured(self) -> MeasuredCosts:
        """The current estimates."""
        believed = replace(self._estimates.measured, **self._sizes)
        if self._mean is not None:
            believed = replace(believed, mean_seconds_between_failures=self._mean)
        if not self._replay_seen:  # an optimizer takes about a tenth of a step
            believed = replace(believed, replay_seconds=believed.step_seconds / 10)
        return believed

    def stepped(self, seconds: float, record_stall: float) -> None:
        """Note that a step was trained in ``seconds``; the training thread waited ``record_stall`` for its log
        record."""
        self._num_steps += 1
        self._steps_since += 1
        self._seconds += max(seconds, 0.0)
        self._record_stall += record_stall
        self._estimates.ran(seconds + record_stall)
        self._asked = self._asked or self._num_steps == WARM_STEPS

    def ran(self, seconds: float) -> None:
        """Note that a step took ``seconds`` which was kept otherwise than by a record."""
        self._estimates.ran(seconds)

    def based(self, nbytes: int, steps: int, stall: float, frozen_bytes: int = 0) -> None:
        """Note that a snapshot of ``nbytes`` and ``frozen_bytes``, which were not written again, is published.

        It was copied at the ends of ``steps`` steps, for which training waited ``stall`` seconds.
        """
        self._sizes |= {"full_bytes": nbytes, "frozen_bytes": frozen_bytes}
        self._estimates.saw("base_stall_seconds", stall)
        self._estimates.saw("base_steps", max(steps, 1))
        self._asked = True

    def wrote(self, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` were written in ``seconds``."""
        if nbytes and seconds > 0:
            self._estimates.saw("write_bytes_per_second", nbytes, seconds)

    def replayed(self, nbytes: int, read_seconds: float, num_records: int, replay_seconds: float) -> None:
        """Note the costs of a resume."""
        if nbytes and read_seconds > 0:
            self._estimates.saw("read_bytes_per_second", nbytes, read_seconds)
        if num_records:
            self._estimates.saw("replay_seconds", replay_seconds, num_records)
            self._replay_seen = True

    def restarted(self, seconds: float, times: int) -> None:
        """Note that the run was restarted ``times`` times before this process, in ``seconds``."""
        self._estimates.ran(max(seconds, 0.0), times)

    def records_are(self, nbytes: int, captured_bytes: int = 0) -> None:
        """Note that records have ``nbytes`` on the disk, and ``captured_bytes`` in memory; 0 is not known."""
        known = {"record_bytes": nbytes, "captured_bytes": captured_bytes}
        self._sizes |= {name: value for name, value in known.items() if value}

    def retuned(self) -> IntervalChange | None:
        """Return another number of steps, if a snapshot or the first steps have shown that it is better by enough."""
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
        best, relaxed = best_within(measured, self.limits)
        steps = rarest(measured, self.limits) if best is None else best.steps
        if _near(steps, self.steps) and (best is None or self._allowed(best)):
            return None
        was, self.steps = self.steps, steps
        return IntervalChange(steps, was, () if best is None else best.binding, relaxed, measured)

    def _allowed(self, best: Optimum) -> bool:
        """Return whether the present steps keep the limits."""
        found = bounds(best.measured, best.limits)
        return all(self.steps >= bound.value if bound.low else self.steps <= bound.value for bound in found)


@dataclass(frozen=True)
class IntervalChange:
    """Another number of steps, and the reason."""

    steps: int
    was: int
    binding: tuple[str, ...]
    relaxed: tuple[str, ...]
    """Limits that cannot be kept, and were left out."""
    measured: MeasuredCosts


def prior(
    full_bytes: int,
    record_bytes: int,
    bytes_per_step: int,
    write_bytes_per_second: float,
    frozen_bytes: int = 0,
) -> MeasuredCosts:
    """Return the estimates for a run of which a first snapshot has been written and nothing else is known."""
    return MeasuredCosts(
        step_seconds=1.0,
        full_bytes=full_bytes,
        frozen_bytes=frozen_bytes,
        record_bytes=record_bytes,
        write_bytes_per_second=write_bytes_per_second,
        read_bytes_per_second=write_bytes_per_second,
        base_stall_seconds=full_bytes / COPY_BYTES_PER_SECOND,
        base_steps=max(1, -(-full_bytes // bytes_per_step)),
        replay_seconds=0.1,
        mean_seconds_between_failures=MEAN_SECONDS_BETWEEN_FAILURES,
    )


class Estimates:
    """Estimates that start at ``prior`` and follow the observations.

    Sums are averaged, not rates: a small write, whose rate is uncertain, weighs little. Each observation multiplies the
    weight of those before by ``keep``.
    """

    def __init__(self, prior: MeasuredCosts, keep: float = KEEP) -> None:
        self._prior, self._keep = prior, keep
        self._seen: dict[str, _Ratio] = {}
        self._ran_seconds, self._failures = 0.0, 0

    def saw(self, quantity: str, amount: float, per: float = 1.0) -> None:
        """Add an observation: ``amount`` of a field of ``MeasuredCosts`` for ``per`` of its unit.

        Examples: ``saw("write_bytes_per_second", nbytes, seconds)``, ``saw("replay_seconds", seconds, num_records)``,
        ``saw("base_stall_seconds", seconds)``.
        """
        self._seen.setdefault(quantity, _Ratio()).add(amount, per, self._keep)

    def ran(self, seconds: float, failures: int = 0) -> None:
        """Add ``seconds`` of running since the last call, with ``failures`` failures."""
        self._ran_seconds += seconds
        self._failures += failures

    @property
    def measured(self) -> MeasuredCosts:
        """The current estimates."""
        values: dict[str, Any] = {name: ratio.amount / ratio.per for name, ratio in self._seen.items()}
        for name in ("full_bytes", "record_bytes", "base_steps"):
            if name in values:
                values[name] = round(values[name])
        believed = self._prior.mean_seconds_between_failures
        mean = mean_between_failures(believed, self._ran_seconds, self._failures)
        return replace(self._prior, mean_seconds_between_failures=mean, **values)


def best_within(measured: MeasuredCosts, limits: Limits) -> tuple[Optimum | None, tuple[str, ...]]:
    """Return the optimum under as many of ``limits`` as can be kept, and those left out. Storage is always kept."""
    for relaxed, some in _relaxations(limits):
        try:
            return optimum(measured, some), relaxed
        except DoesNotFit:
            continue
    return None, ("bandwidth share",)


def rarest(measured: MeasuredCosts, limits: Limits) -> int:
    """Return the most steps that recovery and storage allow, for a disk too slow even for log records."""
    most = [bound.value for bound in bounds(measured, limits) if not bound.low]
    return int(max(1, min(MOST_STEPS, *most)))


def _near(a: int, b: int) -> bool:
    return max(a, b) <= ENOUGH * min(a, b)


def _relaxations(limits: Limits) -> Iterator[tuple[tuple[str, ...], Limits]]:
    yield (), limits
    yield ("recovery time",), replace(limits, recovery_seconds=inf)
    yield ("bandwidth share",), replace(limits, bandwidth_share=1.0)
    yield ("recovery time", "bandwidth share"), replace(limits, recovery_seconds=inf, bandwidth_share=1.0)


def mean_between_failures(prior_seconds: float, seconds: float, failures: int) -> float:
    """Return the mean seconds between failures, after ``failures`` of them in ``seconds``.

    Before, it was believed to be ``prior_seconds``, as firmly as if one failure had been seen (a gamma prior of an
    exponential rate).

    >>> mean_between_failures(3600.0, seconds=0.0, failures=0)
    3600.0
    >>> mean_between_failures(3600.0, seconds=1800.0, failures=2)
    1800.0
    """
    return (prior_seconds + seconds) / (1 + failures)


@dataclass
class _Ratio:
    """A ratio of two sums, in which older observations have exponentially less weight."""

    amount: float = 0.0
    per: float = 0.0

    def add(self, amount: float, per: float, keep: float) -> None:
        self.amount, self.per = keep * self.amount + amount, keep * self.per + per
