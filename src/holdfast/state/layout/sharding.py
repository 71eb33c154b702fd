"""The ways in which a tensor is divided over axes of a mesh, and their reversal.

A ``TensorLayout`` is a tensor whose elements' places are known; what several ranks hold alike is there several times.
Each kind of ``Sharding`` takes the tensors that its ranks hold, by index along its axis, and returns the one that was
divided. Nested divisions are undone with the innermost first.

The arithmetic of ZeRO's division (``zero_starts`` and others) is as DeepSpeed computes it. Readers compare it with what
a checkpoint or an engine records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..rules.expressions import Expression, Value
from ..rules.layouts import Span, along, repeated, spans, widths_of
from .fragments import Fragments, dense, flat, joined
from .regions import Region

Shape = tuple[int, ...]
Names = Mapping[str, Value]
"""The names that expressions may use, with their values."""
RegionPairs = Sequence[tuple[Region, Region]]
"""The regions that a rank holds of a divided tensor, each with its place in the rank's own tensor."""


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """A tensor of ``shape`` whose elements' places are known.

    Each of ``copies`` gives the places of all elements. The copies must be equal, or, if the tensor is ``averaged``,
    their mean is the value.
    """

    shape: Shape
    dtype: str
    copies: tuple[Fragments, ...]
    averaged: bool = False

    def held(self, regions: RegionPairs) -> list[Fragments]:
        """Return, for each copy, its part in each second box of ``regions``, moved to the first box."""
        return [pieces.through(regions) for pieces in self.copies]

    def taken(self, shape: Shape, regions: RegionPairs) -> TensorLayout:
        """Return the tensor of ``shape`` made of each second box of ``regions``, moved to the first box."""
        return replace(self, shape=shape, copies=tuple(self.held(regions)))

    def changed(self, shape: Shape, change: Callable[[Fragments], Fragments]) -> TensorLayout:
        return replace(self, shape=shape, copies=tuple(change(pieces) for pieces in self.copies))


@dataclass(frozen=True)
class SharedHeads:
    """Widths where more ranks than heads share the heads: each rank holds the one that it needs."""

    units: Expression


Widths = str | tuple[Expression, ...] | SharedHeads | None
"""A rule of ``layouts.widths_of``, or explicit widths; None takes the stored widths."""


@dataclass(frozen=True)
class Sharding:
    """A division over ``axes``, of which the last one runs fastest."""

    axes: tuple[str, ...]

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        """Return the tensor of which each of ``count`` ranks holds one of ``parts``.

        Raises ``ValueError`` if the parts do not fit together.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} over {' x '.join(self.axes)}"


class Unique(Sharding):
    """A tensor that one of the ranks has."""

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        if len(parts) > 1:
            raise ValueError(f"{len(parts)} of {count} have it, at {_listed(parts)}: it should be at one")
        return next(iter(parts.values()))


@dataclass(frozen=True)
class Replicate(Sharding):
    """A tensor that all ranks have alike, or, with ``some``, those that have it."""

    some: bool = False

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        if not self.some:
            _need_all(parts, count)
        first, *others = (parts[number] for number in sorted(parts))
        for other in others:
            _need_alike(first, other, None)
        if first.averaged and others:
            raise ValueError(
                "copies of what is averaged are not compared: let `unique` name the one that is taken"
            )
        return replace(first, copies=tuple(pieces for laid in (first, *others) for pieces in laid.copies))


class Average(Sharding):
    """A tensor whose value is the mean over all ranks."""

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        _need_all(parts, count)
        laid = [parts[number] for number in sorted(parts)]
        for other in laid[1:]:
            _need_alike(laid[0], other, None)
        if any(len(one.copies) > 1 and not one.averaged for one in laid):
            raise ValueError(
                "copies of what is averaged are not compared: let `unique` name the one that is taken"
            )
        return replace(
            laid[0], copies=tuple(pieces for one in laid for pieces in one.copies), averaged=count > 1
        )


@dataclass(frozen=True)
class Shard(Sharding):
    """A tensor whose ``dim`` is divided into spans, one after the other.

    ``size`` is the unpadded length of the dim before the division, for ranks that stored nothing because they hold
    nothing.
    """

    dim: int
    widths: Widths = None
    size: Expression | None = None

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        first = next(iter(parts.values()))
        _need_dim(first, self.dim)
        stored = {number: laid.shape[self.dim] for number, laid in parts.items()}
        size = sum(stored.values()) if self.size is None else self.size.value(names)
        found = self._spans(stored, count, size, names)
        if self.size is None and not isinstance(self.widths, tuple):
            _need_all(parts, count)
        for number, (start, stop) in enumerate(found):
            if stored.get(number, 0) != stop - start:
                raise ValueError(_not_as_wide(number, stored, stop - start, count, self.dim))
        cells: dict[Span, list[Fragments]] = {}
        for number in sorted(parts):
            laid = parts[number]
            _need_alike(first, laid, self.dim)
            local = Region.whole(laid.shape)
            moved = along(laid.shape, self.dim, found[number])
            if moved.elements:  # ranks that hold nothing are no copies of each other
                cells.setdefault(found[number], []).extend(laid.held([(moved, local)]))
        shape = _with(first.shape, self.dim, max((stop for _, stop in found), default=0))
        return _tiled(first, shape, list(cells.values()))

    def _spans(self, stored: Mapping[int, int], count: int, size: int, names: Names) -> list[Span]:
        if isinstance(self.widths, SharedHeads):
            units = self.widths.units.value(names)
            total = size if self.size or count <= units else max(stored.values()) * units
            return repeated(total, count, units)
        return spans(_widths(self.widths, stored, count, size, names))


@dataclass(frozen=True)
class Blocks(Sharding):
    """A tensor whose ``dim`` has several blocks of ``sizes``, each divided among the ranks by its ``widths``."""

    dim: int
    sizes: tuple[Expression, ...]
    widths: tuple[Widths, ...]

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        _need_all(parts, count)
        first = parts[0]
        _need_dim(first, self.dim)
        total = sum(laid.shape[self.dim] for laid in parts.values())
        sizes = [size.value({**names, "size": total}) for size in self.sizes]
        held = [
            self._spans(widths, size, count, names) for widths, size in zip(self.widths, sizes, strict=True)
        ]
        at, cells = [0] * count, []
        for (base, _), of_block in zip(spans(sizes), held, strict=True):
            cell: dict[Span, list[Fragments]] = {}
            for number, (start, stop) in enumerate(of_block):
                laid = parts[number]
                _need_alike(first, laid, self.dim)
                local = along(laid.shape, self.dim, (at[number], at[number] + stop - start))
                moved = along(laid.shape, self.dim, (base + start, base + stop))
                if moved.elements:
                    cell.setdefault((start, stop), []).extend(laid.held([(moved, local)]))
                at[number] += stop - start
            cells += cell.values()
        stored = {number: laid.shape[self.dim] for number, laid in parts.items()}
        for number, width in enumerate(at):
            if stored[number] != width:
                raise ValueError(_not_as_wide(number, stored, width, count, self.dim))
        return _tiled(first, _with(first.shape, self.dim, sum(sizes)), cells)

    def _spans(self, widths: Widths, size: int, count: int, names: Names) -> list[Span]:
        if isinstance(widths, SharedHeads):
            return repeated(size, count, widths.units.value(names))
        found = _widths(widths, {}, count, size, names)
        if sum(found) != size:
            raise ValueError(f"the widths {found} of a block of {size} are {sum(found)} in all")
        return spans(found)


@dataclass(frozen=True)
class RegionSharding(Sharding):
    """A tensor of which each rank has the region in ``at``; None means nothing."""

    at: tuple[Region | None, ...]

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        if len(self.at) != count:
            raise ValueError(f"{len(self.at)} boxes are given, of {count} ranks")
        first = next(iter(parts.values()))
        cells: dict[Region, list[Fragments]] = {}
        for number, box in enumerate(self.at):
            if (box is None) != (number not in parts) or (box and box.shape != parts[number].shape):
                stored = list(parts[number].shape) if number in parts else "nothing"
                raise ValueError(
                    f"{number} of {count} should hold {box and list(box.shape)}, and holds {stored}"
                )
            if box is not None and box.elements:
                cells.setdefault(box, []).extend(parts[number].held([(box, Region.whole(box.shape))]))
        shape = tuple(max(ends) for ends in zip(*(box.stop for box in self.at if box), strict=True))
        covered = sum(box.elements for box in cells)
        meeting = Fragments.of([dense(box, 0) for box in cells], len(shape)).overlap()
        if covered != Region.whole(shape).elements or meeting is not None:
            raise ValueError(f"its boxes do not cover {list(shape)} once")
        return _tiled(first, shape, list(cells.values()))


@dataclass(frozen=True)
class Flat(Sharding):
    """A flattened tensor of ``shape`` that is divided into one part per rank, with padding at the end."""

    shape: tuple[Expression, ...]

    def join(self, parts: Mapping[int, TensorLayout], count: int, names: Names) -> TensorLayout:
        _need_all(parts, count)
        shape = tuple(size.value(names) for size in self.shape)
        need, first, at, cells = Region.whole(shape).elements, parts[0], 0, []
        for number in range(count):
            laid = parts[number]
            if len(laid.shape) != 1:
                raise ValueError(
                    f"the part at {number} of {count} is {list(laid.shape)}, and a flat one has one dim"
                )
            _need_alike(first, laid, 0)
            stop = min(at + laid.shape[0], need)
            cells.append([unflattened(pieces, shape, at, stop) for pieces in laid.copies])
            at += laid.shape[0]
        if at < need:
            raise ValueError(f"its parts have {at} elements, and {list(shape)} has {need}")
        return _tiled(first, shape, cells)


def unflattened(pieces: Fragments, shape: Shape, start: int, stop: int, offset: int = 0) -> Fragments:
    """Return the elements ``start`` to ``stop`` of the flattened tensor of ``shape``.

    ``pieces``, of a tensor of one dim, has them from ``offset`` on.
    """
    if start >= stop:
        return Fragments.of((), len(shape))
    inside = pieces.within(Region((offset,), (offset + stop - start,)))
    found = []
    for piece in inside:
        low, high = piece.box.start[0] - offset, piece.box.stop[0] - offset
        if piece.strides != (1,) and high - low > 1:
            raise ValueError("a flat part whose elements do not lie side by side")
        found += flat(shape, start + low, start + high, piece.part, piece.offset)
    return Fragments.of(found, len(shape))


def _tiled(like: TensorLayout, shape: Shape, cells: Sequence[Sequence[Fragments]]) -> TensorLayout:
    """Return the tensor whose regions are ``cells``, each given by its holders.

    Each copy takes one holder of each region, the first where there are no others.
    """
    cells = [cell for cell in cells if cell]
    counts = {len(cell) for cell in cells}
    if like.averaged and counts - {len(like.copies)}:
        raise ValueError("its regions are averaged over different numbers of ranks")
    copies = [
        joined([cell[number] if number < len(cell) else cell[0] for cell in cells], len(shape))
        for number in range(max(counts, default=1))
    ]
    return TensorLayout(shape, like.dtype, tuple(copies), like.averaged)


def _widths(
    widths: str | tuple[Expression, ...] | None,
    stored: Mapping[int, int],
    count: int,
    size: int,
    names: Names,
) -> list[int]:
    if widths is None:
        return [stored.get(number, 0) for number in range(count)]
    if isinstance(widths, str):
        return widths_of(widths, size, count)
    if len(widths) != count:
        raise ValueError(f"{len(widths)} widths are given, of {count} ranks")
    return [width.value(names) for width in widths]


def _need_all(parts: Mapping[int, TensorLayout], count: int) -> None:
    missing = [number for number in range(count) if number not in parts]
    if missing:
        raise ValueError(f"there is none at {_listed(missing)} of {count}: it is missing")


def _need_dim(laid: TensorLayout, dim: int) -> None:
    if dim >= len(laid.shape):
        raise ValueError(f"{list(laid.shape)} has no dim {dim}")


def _need_alike(one: TensorLayout, other: TensorLayout, dim: int | None) -> None:
    """Raise ``ValueError`` unless both tensors agree in dtype and, except for ``dim``, in shape."""
    shapes = [list(laid.shape) for laid in (one, other)]
    alike = [[size for number, size in enumerate(shape) if number != dim] for shape in shapes]
    if alike[0] != alike[1] or one.dtype != other.dtype or one.averaged != other.averaged:
        raise ValueError(
            f"its parts do not fit together: {one.dtype} {shapes[0]} and {other.dtype} {shapes[1]}"
        )


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _not_as_wide(number: int, stored: Mapping[int, int], width: int, count: int, dim: int) -> str:
    held = f"is {stored[number]} wide" if number in stored else "is not there"
    return f"the part at {number} of {count} {held} along dim {dim}, and should be {width}"


def _listed(numbers: Sequence[int] | Mapping[int, TensorLayout]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def zero_starts(numels: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Return where the parameters that ZeRO joins, of ``numels`` elements, begin, and where the last one ends.

    Each but the last is padded to ``alignment`` elements.

    >>> zero_starts([5, 3, 2], 4)
    ([0, 8, 12], 14)
    """
    starts, at = [], 0
    for number, elements in enumerate(numels):
        starts.append(at)
        at += elements
        if number < len(numels) - 1:
            at += -at % alignment
    return starts, at


def zero_share(total: int, ranks: int) -> int:
    """Return the elements of each rank's part of ``total`` ones that ZeRO joined.

    All are padded to a multiple of twice the number of ranks.

    >>> zero_share(877, 4)
    220
    """
    return -(-total // (2 * ranks)) * 2


def zero_order(count: int, ranks: int) -> list[int]:
    """Return the order in which ``round_robin_gradients`` joins parameters.

    >>> zero_order(5, 2)
    [0, 2, 4, 1, 3]
    """
    return sorted(range(count), key=lambda number: (number % ranks, number))


def zero_range(n: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements of a parameter of ``n`` that a rank has in stage 3.

    >>> [zero_range(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-n // ranks)
    return min(rank * each, n), min((rank + 1) * each, n)
