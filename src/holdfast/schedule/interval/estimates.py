"""Estimates of a run's measured costs, updated while they change. Seconds, bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .waste import MeasuredCosts


def mean_between_failures(
    prior_seconds: float, prior_failures: float, seconds: float, failures: int
) -> float:
    """Return the mean seconds between failures, after ``failures`` of them in ``seconds``.

    Before, it was believed to be ``prior_seconds``, as firmly as if ``prior_failures`` failures had been seen (a gamma
    prior of an exponential rate).

    >>> mean_between_failures(3600.0, 1.0, seconds=0.0, failures=0)
    3600.0
    >>> mean_between_failures(3600.0, 1.0, seconds=1800.0, failures=2)
    1800.0
    """
    return (prior_failures * prior_seconds + seconds) / (prior_failures + failures)


@dataclass
class _Ratio:
    """A ratio of two sums, in which older observations have exponentially less weight."""

    amount: float = 0.0
    per: float = 0.0

    def add(self, amount: float, per: float, keep: float) -> None:
        self.amount, self.per = keep * self.amount + amount, keep * self.per + per


class Estimates:
    """Estimates that start at ``prior`` and follow the observations.

    Sums are averaged, not rates: a small write, whose rate is uncertain, weighs little. Each observation multiplies the
    weight of those before by ``keep``.
    """

    def __init__(self, prior: MeasuredCosts, prior_failures: float = 1.0, keep: float = 0.8) -> None:
        if not prior_failures > 0 or not 0 <= keep < 1:
            raise ValueError(
                f"prior_failures must be positive and keep lie in [0, 1), got {prior_failures}, {keep}"
            )
        self._prior, self._prior_failures, self._keep = prior, prior_failures, keep
        self._seen: dict[str, _Ratio] = {}
        self._ran_seconds, self._failures = 0.0, 0

    def saw(self, quantity: str, amount: float, per: float = 1.0) -> None:
        """Add an observation: ``amount`` of a field of ``MeasuredCosts`` for ``per`` of its unit.

        Examples: ``saw("write_bytes_per_second", nbytes, seconds)``, ``saw("replay_seconds", seconds, num_records)``,
        ``saw("base_stall_seconds", seconds)``.
        """
        known = {field.name for field in fields(MeasuredCosts)} - {"mean_seconds_between_failures"}
        if quantity not in known:
            raise ValueError(f"{quantity!r} is not one of {', '.join(sorted(known))}")
        if amount < 0 or per <= 0:
            raise ValueError(f"{quantity}: {amount} per {per} cannot be measured")
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
        mean = mean_between_failures(
            self._prior.mean_seconds_between_failures, self._prior_failures, self._ran_seconds, self._failures
        )
        return replace(self._prior, mean_seconds_between_failures=mean, **values)
