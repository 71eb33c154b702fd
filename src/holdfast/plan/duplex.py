"""Duplex: how long something takes that moves bytes two ways: an SSD that is read and written, a bus.

Rates are bytes per second. What is known is each way alone, and both at once in equal parts; between these the time is
interpolated. Without the latter the ways take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .affine import Affine


@dataclass(frozen=True, kw_only=True)
class Duplex:
    """Two ways. ``mixed`` is the sum of both, measured with as much one way as the other.

    >>> Duplex(one=4.0, other=2.0).seconds(8, 8), Duplex(one=4.0, other=2.0, mixed=4.0).seconds(8, 8)
    (6.0, 4.0)
    """

    one: float = inf
    other: float = inf
    mixed: float | None = None

    def rows(self, one: Affine, other: Affine) -> list[Affine]:
        """Seconds for ``one`` and ``other`` bytes, as the largest of these. A device on which the ways gain by each
        other has two rows; on one where they lose (as reads do beside writes), each byte takes the longer time of the
        mixture, whatever the mixture, which is careful."""
        turns = 1 / self.one + 1 / self.other
        both = turns if self.mixed is None else 2 / self.mixed
        if both >= turns:
            slower = both / turns if turns else 1.0
            return [one * (slower / self.one) + other * (slower / self.other)]
        return [(one - other) / self.one + other * both, (other - one) / self.other + one * both]

    def seconds(self, one: float, other: float) -> float:
        """For so many bytes each way."""
        return max(row({}) for row in self.rows(Affine(one), Affine(other)))

    def slowdown(self, one: float, other: float) -> float:
        """``seconds`` over those of ways that take turns, for the same bytes."""
        turns = one / self.one + other / self.other
        return self.seconds(one, other) / turns if turns else 1.0
