"""Failures: a run that fails at random moments, to see what an interval between bases wastes. Seeded; seconds, bytes.

Unlike ``waste.py`` this takes no averages: it follows records and bases one by one, knows what was durable when a
failure came, makes a base that was lost again, and recovers again where recovery fails. Failures are Poisson.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass

from holdfast.schedule.interval.waste import HOUR, MeasuredCosts, pace


@dataclass(frozen=True)
class Outcome:
    """Of a simulated run."""

    seconds: float
    steps: int
    """Kept."""
    wasted_per_hour: float
    longest_recovery_seconds: float
    """Load and replay, without the restart."""


def simulate(
    measured: MeasuredCosts, steps: int, has_records: bool = True, *, num_failures: int = 2000, seed: int = 0
) -> Outcome:
    """A run with a base every ``steps`` until it has recovered from ``num_failures``."""
    chance = random.Random(seed)
    rate = 1 / measured.mean_seconds_between_failures
    run = _Run(measured, steps, has_records)
    seconds, longest = 0.0, 0.0
    for _ in range(num_failures):
        until = chance.expovariate(rate)
        recovery = run.fail_after(until)
        longest = max(longest, recovery)
        seconds += until
        while (again := chance.expovariate(rate)) < measured.restart_seconds + recovery:
            seconds += again
        seconds += measured.restart_seconds + recovery
    kept = run.step * measured.step_seconds
    return Outcome(seconds, run.step, HOUR * (1 - kept / seconds), longest)


class _Run:
    """Where the run is: ``step`` is durable, and ``base`` the newest that is."""

    def __init__(self, measured: MeasuredCosts, base_every: int, has_records: bool = True) -> None:
        self.m, self.base_every, self.has_records = measured, base_every, has_records
        self.step = self.base = 0
        *_, contention = pace(measured, base_every, has_records)
        self.step_wall = measured.step_seconds + measured.record_stall_seconds + contention

    def fail_after(self, seconds: float) -> float:
        """Train for so long, fail, and return how long load and replay take."""
        now, start = 0.0, self.step
        late = self.m.write_seconds
        while True:
            # The next base is published when it is due, or as soon as one can be made where the last was lost.
            length = max(self.base + self.base_every, start + self.m.base_steps) - start
            left = seconds - now - late
            steps = (
                length if self._wall_seconds(length, length) <= left else self._durable_steps(length, left)
            )
            self.step = start + steps if steps else self.step
            if steps < length:
                return self._recovery_seconds()
            now += self._wall_seconds(length, length)
            start += length
            self.base = start

    def _durable_steps(self, length: int, sealed_before: float) -> int:
        """Of the ``length`` steps to the next base, those whose records were sealed so many seconds after the first
        began."""
        steps = range(length + 1) if self.has_records else range(1)
        sealed = bisect_right(steps, sealed_before, key=lambda step: self._wall_seconds(step, length))
        return max(sealed - 1, 0)

    def _wall_seconds(self, steps: int, length: int) -> float:
        """Of the first ``steps`` of ``length``, at the last ``base_steps`` of which the base is copied."""
        copied = max(0, steps - length + self.m.base_steps) / self.m.base_steps
        return steps * self.step_wall + copied * self.m.base_stall_seconds

    def _recovery_seconds(self) -> float:
        return self.m.load_seconds + (self.step - self.base) * self.m.replay_record_seconds
