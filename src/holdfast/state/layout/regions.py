"""Axis-aligned, half-open regions of a tensor, in elements.

The region of a scalar has no axes and holds one element.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True)
class Region:
    """The region of elements with ``start[d] <= index[d] < stop[d]`` on every axis ``d``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            not 0 <= a <= b for a, b in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"no box from {self.start} to {self.stop}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the region of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """Return the common region, or None if there is none.

        >>> Region((0, 0), (4, 4)).intersect(Region((2, 1), (6, 3)))
        Region(start=(2, 1), stop=(4, 3))
        """
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return None if any(a >= b for a, b in zip(start, stop, strict=True)) else Region(start, stop)

    def moved(self, offset: tuple[int, ...]) -> Region:
        """Return this region moved by ``offset`` elements along each axis."""
        return Region(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(b + o for b, o in zip(self.stop, offset, strict=True)),
        )

    def rows(self, rows: range) -> Region:
        """Return the part with only ``rows`` of the first axis, counted from the start of the region.

        >>> Region((2, 0), (8, 4)).rows(range(1, 3))
        Region(start=(3, 0), stop=(5, 4))
        """
        first = self.start[0]
        return Region((first + rows.start, *self.start[1:]), (first + rows.stop, *self.stop[1:]))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the region of an array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def to_json(self) -> list[list[int]]:
        return [list(self.start), list(self.stop)]

    @classmethod
    def from_json(cls, value: list[list[int]]) -> Region:
        return cls(tuple(value[0]), tuple(value[1]))


def joined(boxes: Iterable[Region]) -> list[Region]:
    """Return ``boxes`` sorted, with those merged that follow each other along the first axis.

    >>> joined([Region((2, 0), (4, 3)), Region((0, 0), (2, 3)), Region((4, 0), (5, 2))])
    [Region(start=(0, 0), stop=(4, 3)), Region(start=(4, 0), stop=(5, 2))]
    """
    found: list[Region] = []
    for box in sorted(boxes):
        last = found[-1] if found else None
        follows = last is not None and box.start and (last.stop[0], *last.start[1:]) == box.start
        if last is not None and follows and last.stop[1:] == box.stop[1:]:
            found[-1] = Region(last.start, box.stop)
        else:
            found.append(box)
    return found
