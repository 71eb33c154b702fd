"""Affine expressions: written like numbers, read as a row of a linear program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Affine:
    """A constant plus multiples of named unknowns: ``constant + sum(terms[name] * name)``.

    >>> bytes_read = 10 * (1 - Affine.of("kept")) + 5
    >>> bytes_read({"kept": 0.25}), bytes_read.least
    (12.5, 5.0)
    """

    constant: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> Affine:
        """Return the unknown ``name``."""
        return cls(0.0, {name: 1.0})

    def __add__(self, other: Affine | float) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.constant + other, self.terms)
        names = {**self.terms, **other.terms}
        terms = {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in names}
        return Affine(self.constant + other.constant, terms)

    def __mul__(self, factor: float) -> Affine:
        return Affine(self.constant * factor, {name: value * factor for name, value in self.terms.items()})

    def __truediv__(self, divisor: float) -> Affine:
        return self * (1 / divisor)

    def __neg__(self) -> Affine:
        return self * -1.0

    def __sub__(self, other: Affine | float) -> Affine:
        return self + -other

    def __rsub__(self, other: float) -> Affine:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __call__(self, values: Mapping[str, float]) -> float:
        """Return the value for given unknowns."""
        return self.constant + sum(value * values[name] for name, value in self.terms.items())

    @property
    def least(self) -> float:
        """The smallest value, for unknowns that lie between 0 and 1."""
        return self.constant + sum(min(value, 0.0) for value in self.terms.values())
