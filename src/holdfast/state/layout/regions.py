"""The parts of a tensor that a process holds, and the process that stores each of them. In elements.

A part is an axis-aligned, half-open region, or a flat range. The region of a scalar has no axes and holds one element.
A flat range is a run of consecutive elements of the flattened tensor, held as a tensor of one dim: ZeRO leaves such a
part of a parameter to a rank, and FSDP1 did in runs of an earlier version. It is used like a region, except for its
shape, which is (n,): in the whole tensor it is several regions.

A tensor that is not distributed is held whole. What several ranks hold alike, as in DDP, one of them stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import le, sub
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...errors import ModelNotSupported

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class Region:
    """The region of elements with ``start[d] <= index[d] < stop[d]`` on every axis ``d``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        fits = len(self.start) == len(self.stop) and all(map(le, self.start, self.stop))
        if not fits or min(self.start, default=0) < 0:
            raise ValueError(f"no box from {self.start} to {self.stop}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the region of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

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
        return tuple(map(slice, self.start, self.stop))

    def slices_in(self, held: Region) -> tuple[slice, ...]:
        """Return the slices that select the region of an array of the region ``held``."""
        ends = zip(self.start, self.stop, held.start, strict=True)
        return tuple([slice(start - first, stop - first) for start, stop, first in ends])

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
                target[common.slices_in(one)].copy_(source[common.slices_in(other)])


def whole_blocks(whole: Sequence[int], region: AnyRegion, size: int) -> Region | None:
    """Return the range of blocks that make up ``region``; None if it is not made of whole blocks.

    Args:
        whole: The shape of the whole tensor.
        region: A region of it.
        size: The elements of one block; blocks follow one another in the flattened tensor.
    """
    if not isinstance(region, Region) or not whole or region.shape[1:] != tuple(whole[1:]):
        return None
    row = prod(whole[1:])
    first, stop = region.start[0] * row, region.stop[0] * row
    return None if first % size or stop % size else Region((first // size,), (stop // size,))


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


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """Return the regions that make up the elements ``start`` to ``stop`` of a flattened tensor, in their order.

    >>> [box.to_json() for box in flat_boxes((3, 4), 3, 9)]
    [[[0, 3], [1, 4]], [[1, 0], [2, 4]], [[2, 0], [3, 1]]]
    """
    if start >= stop:
        return []
    if not shape:
        return [Region((), ())]
    row, rest = prod(shape[1:]), tuple(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _rows_of(first, flat_boxes(rest, head, tail))
    boxes = _rows_of(first, flat_boxes(rest, head, row)) if head else []
    whole = first + 1 if head else first
    if whole < last:
        boxes.append(Region((whole, *[0] * len(rest)), (last, *rest)))
    return boxes + (_rows_of(last, flat_boxes(rest, 0, tail)) if tail else [])


def _rows_of(row: int, boxes: list[Region]) -> list[Region]:
    return [Region((row, *box.start), (row + 1, *box.stop)) for box in boxes]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a ``DTensor``."""
    return hasattr(tensor, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of ``tensor``, in the same memory."""
    return cast(Any, tensor).to_local() if is_distributed(tensor) else tensor


def local_held(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of ``tensor`` without involving autograd."""
    return getattr(tensor, "_local_tensor", tensor)


def is_cut_alike(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether ``tensor`` is not distributed, or has the shape and the placements of ``like``."""
    if not is_distributed(tensor):
        return True
    placements = cast(Any, tensor).placements
    return tensor.shape == like.shape and placements == getattr(like, "placements", None)


def box_of(name: str, tensor: torch.Tensor) -> Region:
    """Return the region of ``tensor`` that this process holds. Raises ``ModelNotSupported`` if it is not one region."""
    if not is_distributed(tensor):
        return Region.whole(tuple(tensor.shape))
    distributed = cast(Any, tensor)
    if any(placement.is_partial() for placement in distributed.placements):
        raise ModelNotSupported(
            f"{name} is a sum that its ranks have not formed yet (placement Partial), so no rank has its values."
            " Redistribute it first: tensor.redistribute(placements=[Replicate(), ...])."
        )
    chunks = distributed.__create_chunk_list__()
    if len(chunks) != 1 or _has_gaps(distributed):
        raise ModelNotSupported(
            f"{name} is cut into several regions on one rank (placements {distributed.placements}), which is not"
            " supported. Redistribute it first: tensor.redistribute(placements=[Shard(0), ...])."
        )
    start, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    local = tuple(local_of(tensor).shape)
    if sizes != local:
        raise ModelNotSupported(f"{name} says that it holds {sizes} here, and its local tensor is {local}")
    return Region(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))


def _has_gaps(distributed: Any) -> bool:
    """Return whether this rank holds several pieces of ``distributed``, of which torch reports only the first.

    That happens where a strided placement, which FSDP2 makes for a dimension that tensor parallelism has sharded, is
    not followed by those shardings.
    """
    sizes, placements = distributed.device_mesh.shape, distributed.placements
    return any(
        placement.split_factor != prod(
            sizes[later] for later in range(axis + 1, len(placements)) if placements[later].is_shard(placement.dim)
        )
        for axis, placement in enumerate(placements)
        if hasattr(placement, "split_factor")
    )  # fmt: skip


def owners(held: Sequence[Mapping[str, tuple[AnyRegion, int]]]) -> list[set[str]]:
    """Return the names of the tensors that each rank stores.

    ``held`` gives, by rank, the region and the bytes of each tensor that the rank holds. Every region is stored once,
    by the holder that has the least bytes so far.

    >>> one, two = (Region((0,), (4,)), 16), (Region((0,), (2,)), 8)
    >>> [sorted(names) for names in owners([{"a": one, "b": two}, {"a": one, "b": two}])]
    [['a'], ['b']]
    """
    holders: dict[tuple[str, AnyRegion], list[int]] = {}
    nbytes: dict[tuple[str, AnyRegion], int] = {}
    for rank, tensors in enumerate(held):
        for name, (box, size) in tensors.items():
            holders.setdefault((name, box), []).append(rank)
            nbytes[name, box] = size
    loads, found = [0] * len(held), [set[str]() for _ in held]
    for part in sorted(holders, key=lambda part: (-nbytes[part], part)):
        rank = min(holders[part], key=lambda rank: loads[rank])
        loads[rank] += nbytes[part]
        found[rank].add(part[0])
    return found


class ReplicatedRegion(NamedTuple):
    """A region of a parameter that several ranks hold, of ``nbytes``. The first of ``ranks`` stores it."""

    name: str
    box: AnyRegion
    nbytes: int
    ranks: tuple[int, ...]


def copies(
    held: Sequence[Mapping[str, tuple[AnyRegion, int]]], stored: Sequence[set[str]]
) -> tuple[ReplicatedRegion, ...]:
    """Return the regions that several ranks hold, in an order that is the same on all ranks.

    The arguments say what each rank holds and stores (``owners``).

    >>> one, two = (Region((0,), (4,)), 16), (Region((0,), (2,)), 8)
    >>> held = [{"a": one, "b": two}, {"a": one}]
    >>> [(each.name, each.ranks) for each in copies(held, [{"b"}, {"a"}])]
    [('a', (1, 0))]
    """
    holders: dict[tuple[str, AnyRegion, int], list[int]] = {}
    for rank, tensors in enumerate(held):
        for name, (box, nbytes) in tensors.items():
            holders.setdefault((name, box, nbytes), []).append(rank)
    return tuple(
        ReplicatedRegion(*part, tuple(sorted(ranks, key=lambda rank: part[0] not in stored[rank])))
        for part, ranks in sorted(holders.items())
        if len(ranks) > 1
    )
