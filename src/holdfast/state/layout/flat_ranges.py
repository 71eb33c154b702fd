"""Flat ranges: consecutive elements of a flattened tensor, held as a tensor of one dim.

ZeRO leaves such a part of a parameter to a rank, and FSDP1 did in runs of an earlier version. A flat range is used like
a region, except for its shape, which is (n,): in the whole tensor it is several regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import ModelNotSupported
from .fragments import flat_boxes
from .regions import Region, joined

if TYPE_CHECKING:
    import torch


FLAT = "flat"
"""The key of a fragment's elements in the flattened tensor, where its writer held them as a stretch."""


@dataclass(frozen=True, order=True)
class FlatRange:
    """The elements ``first`` to ``stop`` of a tensor of the shape ``whole`` in C order.

    >>> stretch = FlatRange((3, 4), 3, 9)
    >>> stretch.shape, [box.to_json() for box in stretch.boxes]
    ((6,), [[[0, 3], [1, 4]], [[1, 0], [2, 4]], [[2, 0], [3, 1]]])
    """

    whole: tuple[int, ...]
    first: int
    stop: int

    @classmethod
    def joined(cls, whole: tuple[int, ...], ranges: Iterable[Sequence[int]]) -> FlatRange:
        """Return the stretch made of ranges of elements that follow each other, in any order.

        Raises ``ValueError`` if there is a gap.

        >>> FlatRange.joined((3, 4), [(5, 9), (3, 5)])
        FlatRange(whole=(3, 4), first=3, stop=9)
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
    def boxes(self) -> list[Region]:
        """The regions of the whole tensor that make up the stretch, in order: at most 2 r - 1 for r axes."""
        return flat_boxes(self.whole, self.first, self.stop)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The elements of the flattened tensor that each of ``boxes`` holds."""
        return list(pairwise(accumulate((box.elements for box in self.boxes), initial=self.first)))

    def rows(self, rows: range) -> FlatRange:
        """Return the part with only the elements ``rows``, counted from the start of the stretch.

        >>> FlatRange((3, 4), 3, 9).rows(range(1, 3))
        FlatRange(whole=(3, 4), first=4, stop=6)
        """
        return FlatRange(self.whole, self.first + rows.start, self.first + rows.stop)

    def views(self, held: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
        """Return the boxes, each with its view of ``held``, which has the stretch's own shape."""
        found = held.split([box.elements for box in self.boxes])
        return [(box, view.view(box.shape)) for box, view in zip(self.boxes, found, strict=True)]

    def to_json(self) -> list[int]:
        return [self.first, self.stop]


AnyRegion = Region | FlatRange
"""The part of a tensor that a process holds."""


def views_of(region: AnyRegion, held: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """Return the boxes of ``region``, each with its view of ``held``, which has the region's shape."""
    return region.views(held) if isinstance(region, FlatRange) else [(region, held)]


def boxes_of(region: AnyRegion) -> list[Region]:
    """Return the boxes of ``region``."""
    return region.boxes if isinstance(region, FlatRange) else [region]


def regions_of(shape: Sequence[int], fragments: Sequence[Mapping[str, Any]]) -> list[AnyRegion]:
    """Return the regions that one writer stored of a tensor of ``shape``: one stretch, or boxes.

    ``fragments`` are its fragments in the index.
    """
    flat = [fragment[FLAT] for fragment in fragments if FLAT in fragment]
    if flat:
        return [FlatRange.joined(tuple(shape), flat)]
    return [*joined(Region.from_json(fragment["global"]) for fragment in fragments)]


def copy_common(held: torch.Tensor, here: AnyRegion, value: torch.Tensor, there: AnyRegion) -> None:
    """Copy from ``value``, the region ``there``, the elements that are also in ``held``, the region ``here``."""
    for one, target in views_of(here, held):
        for other, source in views_of(there, value):
            common = one.intersect(other)
            if common is not None:
                into, out_of = (common.moved(tuple(-a for a in region.start)) for region in (one, other))
                target[into.slices].copy_(source[out_of.slices])


def refuse_gaps(held: Sequence[Mapping[str, AnyRegion]], here: Mapping[str, AnyRegion]) -> None:
    """Raise ``ModelNotSupported`` unless the stretches of all ranks make up the whole parameter.

    Each element must be held once, or once in each of several copies. Only parameters that are a stretch ``here`` are
    checked.
    """
    for name, mine in here.items():
        if not isinstance(mine, FlatRange):
            continue
        regions = {rank[name] for rank in held if name in rank}
        stretches = sorted(region for region in regions if isinstance(region, FlatRange))
        ends = [0, *(stretch.stop for stretch in stretches)]
        whole = {stretch.whole for stretch in stretches} == {mine.whole} and ends[-1] == prod(mine.whole)
        if len(stretches) < len(regions) or not whole or ends[:-1] != [each.first for each in stretches]:
            told = ", ".join(f"{each.first} to {each.stop} of {list(each.whole)}" for each in stretches)
            raise ModelNotSupported(
                f"the ranks hold the elements {told} of {name}, {list(mine.whole)} here, and together that is not each"
                " of it once. Wrap the model alike on all ranks, over all of them."
            )


def is_nothing(region: AnyRegion | None) -> bool:
    """Return whether the region is an empty stretch.

    The rank then has neither gradients nor optimizer state for the parameter.
    """
    return isinstance(region, FlatRange) and not region.elements
