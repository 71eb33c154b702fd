"""Stretches: elements of a flattened tensor that follow each other, held as a tensor of one dim: what ZeRO leaves a
rank of a parameter, and what FSDP1 left one of in runs of an earlier version.

What is done with a region of a tensor is done with a stretch as with a box, but for its shape, which is (n,): in the
whole tensor it is several boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import ModelNotSupported
from .boxes import Box, joined
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
    def ranges(self) -> list[tuple[int, int]]:
        """Which elements of the flattened tensor each of its boxes is."""
        return list(pairwise(accumulate((box.elements for box in self.boxes), initial=self.first)))

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


def regions_of(shape: Sequence[int], fragments: Sequence[Mapping[str, Any]]) -> list[Region]:
    """What the ``fragments`` of an index that one writer stored of a tensor of ``shape`` are: one stretch, or boxes."""
    flat = [fragment[FLAT] for fragment in fragments if FLAT in fragment]
    if flat:
        return [Stretch.joined(tuple(shape), flat)]
    return [*joined(Box.from_json(fragment["global"]) for fragment in fragments)]


def copy_common(held: torch.Tensor, here: Region, value: torch.Tensor, there: Region) -> None:
    """Copy what ``held``, which is the region ``here``, has in common with ``value``, which is ``there``."""
    for one, target in views_of(here, held):
        for other, source in views_of(there, value):
            common = one.intersect(other)
            if common is not None:
                into, out_of = (common.moved(tuple(-a for a in region.start)) for region in (one, other))
                target[into.slices].copy_(source[out_of.slices])


def refuse_gaps(held: Sequence[Mapping[str, Region]], here: Mapping[str, Region]) -> None:
    """Raise ``ModelNotSupported`` unless the stretches that all ranks have ``held``, of a parameter that is one
    ``here``, are all of it, each element once, or in each of several copies."""
    for name, mine in here.items():
        if not isinstance(mine, Stretch):
            continue
        regions = {rank[name] for rank in held if name in rank}
        stretches = sorted(region for region in regions if isinstance(region, Stretch))
        ends = [0, *(stretch.stop for stretch in stretches)]
        whole = {stretch.whole for stretch in stretches} == {mine.whole} and ends[-1] == prod(mine.whole)
        if len(stretches) < len(regions) or not whole or ends[:-1] != [each.first for each in stretches]:
            told = ", ".join(f"{each.first} to {each.stop} of {list(each.whole)}" for each in stretches)
            raise ModelNotSupported(
                f"the ranks hold the elements {told} of {name}, {list(mine.whole)} here, and together that is not each"
                " of it once. Wrap the model alike on all ranks, over all of them."
            )


def is_nothing(region: Region | None) -> bool:
    """Whether it is a stretch of no elements: of its parameter a rank has neither gradients nor optimizer state."""
    return isinstance(region, Stretch) and not region.elements
