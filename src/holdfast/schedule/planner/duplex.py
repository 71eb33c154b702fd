"""Time for moving bytes two ways at once: an SSD that is read and written, or a bus.

Rates are bytes per second. Known are the rate of each way alone, and the rate of both at once in equal parts. Between
these the time is interpolated. Without the latter the ways take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .affine import Affine


@dataclass(frozen=True, kw_only=True)
class Duplex:
    """The rates of two ways. ``mixed`` is the sum of both, measured with as much one way as the other.

    >>> Duplex(one=4.0, other=2.0).seconds(8, 8), Duplex(one=4.0, other=2.0, mixed=4.0).seconds(8, 8)
    (6.0, 4.0)
    """

    one: float = inf
    other: float = inf
    mixed: float | None = None

    def rows(self, one: Affine, other: Affine) -> list[Affine]:
        """Return the seconds for ``one`` and ``other`` bytes, as rows whose largest value counts.

        A device on which the ways help each other has two rows. On one where they slow each other down (as reads do
        beside writes), each byte takes the longer time of the equal mixture, whatever the mixture, which is a careful
        estimate.
        """
        turns = 1 / self.one + 1 / self.other
        both = turns if self.mixed is None else 2 / self.mixed
        if both >= turns:
            slower = both / turns if turns else 1.0
            return [one * (slower / self.one) + other * (slower / self.other)]
        return [(one - other) / self.one + other * both, (other - one) / self.other + one * both]

    def seconds(self, one: float, other: float) -> float:
        """Return the seconds for ``one`` and ``other`` bytes."""
        return max(row({}) for row in self.rows(Affine(one), Affine(other)))

    def slowdown(self, one: float, other: float) -> float:
        """Return ``seconds`` divided by the time of ways that take turns, for the same bytes."""
        turns = one / self.one + other / self.other
        return self.seconds(one, other) / turns if turns else 1.0
