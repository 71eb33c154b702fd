"""Stretches: elements of a flattened tensor that follow each other, held as a tensor of one dim: what FSDP1 leaves a
rank of a parameter.

What is done with a region of a tensor is done with a stretch as with a box, but for its shape, which is (n,): in the
whole tensor it is several boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from .boxes import Box
from .pieces import flat_boxes

if TYPE_CHECKING:
    import torch

FLAT = "flat"
"""Of a fragment in an index: which elements of the flattened tensor it is, where its writer held them as a stretch."""


@dataclass(frozen=True, order=True)
class Stretch:
    """The elements ``first`` to ``stop`` of a tensor of the shape ``whole`` in C order.

    >>> stretch = Stretch((3, 4), 3, 9)
    >>> stretch.shape, [box.to_json() for box in stretch.boxes]
    ((6,), [[[0, 3], [1, 4]], [[1, 0], [2, 4]], [[2, 0], [3, 1]]])
    """

    whole: tuple[int, ...]
    first: int
    stop: int

    @classmethod
    def joined(cls, whole: tuple[int, ...], ranges: Iterable[Sequence[int]]) -> Stretch:
        """Of ranges of elements that follow each other, in any order.

        >>> Stretch.joined((3, 4), [(5, 9), (3, 5)])
        Stretch(whole=(3, 4), first=3, stop=9)
        """
        in_order = sorted((first, stop) for first, stop in ranges)
        if any(before[1] != after[0] for before, after in pairwise(in_order)):
            raise ValueError(f"the ranges {in_order} of a flattened tensor do not follow each other")
        return cls(whole, in_order[0][0], in_order[-1][1])

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.elements,)

    @property
    def elements(self) -> int:
        return self.stop - self.first

    @property
    def boxes(self) -> list[Box]:
        """That it is in the whole tensor, in order: at most 2 r - 1 for r axes."""
        return flat_boxes(self.whole, self.first, self.stop)

    @property
    def starts(self) -> list[int]:
        """Of its boxes, where each begins in the flattened tensor, and where the last one ends."""
        return list(accumulate((box.elements for box in self.boxes), initial=self.first))

    def rows(self, rows: range) -> Stretch:
        """Of what is held the elements ``rows`` alone, counted from where it begins.

        >>> Stretch((3, 4), 3, 9).rows(range(1, 3))
        Stretch(whole=(3, 4), first=4, stop=6)
        """
        return Stretch(self.whole, self.first + rows.start, self.first + rows.stop)

    def views(self, held: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """Its boxes, each with what of ``held``, of its own shape, that is."""
        found = held.split([box.elements for box in self.boxes])
        return [(box, view.view(box.shape)) for box, view in zip(self.boxes, found, strict=True)]

    def to_json(self) -> list[int]:
        return [self.first, self.stop]


Region = Box | Stretch
"""What a process holds of a tensor."""


def views_of(region: Region, held: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that ``region`` is, each with what of ``held``, of its shape, that is."""
    return region.views(held) if isinstance(region, Stretch) else [(region, held)]


def boxes_of(region: Region) -> list[Box]:
    """The boxes that ``region`` is."""
    return region.boxes if isinstance(region, Stretch) else [region]


def is_nothing(region: Region | None) -> bool:
    """Whether it is a stretch of no elements: of its parameter a rank has neither gradients nor optimizer state."""
    return isinstance(region, Stretch) and not region.elements
