"""The places of a tensor's elements in the arrays that hold it.

A *part* is one stored array: the local tensor of a rank, a flat partition, an entry of a foreign file. A ``Fragment``
gives the place of one region of the tensor in a part: its element at ``index`` is at ``offset + sum((index[d] -
start[d]) * strides[d])`` of the part, in elements. Every layout is a list of pieces: shards, flat partitions of ZeRO
and FSDP, fused and interleaved projections, transposes.

A tensor may have a million of them, so they are columns of arrays, and every operation works on all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from .regions import Region, flat_boxes


class Fragment(NamedTuple):
    """One region of a tensor, and its place in the part of number ``part``."""

    box: Region
    part: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Fragments:
    """The pieces of one tensor of ``rank`` axes, in columns.

    ``start``, ``stop`` and ``strides`` have the shape (n, rank), ``part`` and ``offset`` the shape (n); all are
    int64.
    """

    start: np.ndarray
    stop: np.ndarray
    part: np.ndarray
    offset: np.ndarray
    strides: np.ndarray

    @classmethod
    def of(cls, pieces: Iterable[Fragment], rank: int) -> Fragments:
        """Return the columns for ``pieces`` of a tensor of ``rank`` axes, in this order.

        >>> pieces = Fragments.of(flat((4, 6), 8, 20, part=3), rank=2)
        >>> [(piece.box.start, piece.box.stop, piece.offset) for piece in pieces]
        [((1, 2), (2, 6), 0), ((2, 0), (3, 6), 4), ((3, 0), (4, 2), 10)]
        """
        rows = list(pieces)
        shaped = [
            np.array(column, dtype=np.int64).reshape(len(rows), rank)
            for column in ([p.box.start for p in rows], [p.box.stop for p in rows], [p.strides for p in rows])
        ]
        part = np.array([p.part for p in rows], dtype=np.int64)
        offset = np.array([p.offset for p in rows], dtype=np.int64)
        return cls(shaped[0], shaped[1], part, offset, shaped[2])

    def __len__(self) -> int:
        return len(self.part)

    def __iter__(self) -> Iterator[Fragment]:
        return map(self.piece, range(len(self)))

    def piece(self, number: int) -> Fragment:
        """Return the piece of that number."""
        box = Region(tuple(self.start[number].tolist()), tuple(self.stop[number].tolist()))
        return Fragment(
            box, int(self.part[number]), int(self.offset[number]), tuple(self.strides[number].tolist())
        )

    def only(self, kept: np.ndarray) -> Fragments:
        """Return the pieces for which ``kept``, bool[n], is true."""
        return Fragments(
            self.start[kept], self.stop[kept], self.part[kept], self.offset[kept], self.strides[kept]
        )

    @property
    def rank(self) -> int:
        return self.start.shape[1]

    @cached_property
    def elements(self) -> np.ndarray:
        """The number of elements of each piece."""
        return np.prod(self.stop - self.start, axis=1, dtype=np.int64)

    @property
    def spans(self) -> np.ndarray:
        """The number of elements from the first to the last of each piece, in its part."""
        return 1 + ((self.stop - self.start - 1) * self.strides).sum(axis=1)

    def within(self, box: Region) -> Fragments:
        """Return the parts of the pieces in ``box``, in the coordinates of the tensor, without empty ones."""
        start = np.maximum(self.start, np.array(box.start, dtype=np.int64))
        stop = np.minimum(self.stop, np.array(box.stop, dtype=np.int64))
        offset = self.offset + ((start - self.start) * self.strides).sum(axis=1)
        return Fragments(start, stop, self.part, offset, self.strides).only(np.all(start < stop, axis=1))

    def overlap(self) -> tuple[Region, Region] | None:
        """Return two boxes with an element in common, or None if there are none."""
        groups = [np.arange(len(self))[self.elements > 0]]
        while groups:
            group = groups.pop()
            if len(group) < 2:
                continue
            parts = next(
                (found for axis in range(self.rank) if len(found := self._apart(group, axis)) > 1), None
            )
            if parts is not None:
                groups += parts
            elif (pair := self._meeting(group)) is not None:
                return pair
        return None

    def _apart(self, group: np.ndarray, axis: int) -> list[np.ndarray]:
        """Divide ``group`` into groups that have nothing in common along ``axis``."""
        order = group[np.argsort(self.start[group, axis], kind="stable")]
        reached = np.maximum.accumulate(self.stop[order, axis])
        return np.split(order, np.flatnonzero(self.start[order[1:], axis] >= reached[:-1]) + 1)

    def _meeting(self, group: np.ndarray) -> tuple[Region, Region] | None:
        for number, one in enumerate(group[:-1]):
            others = group[number + 1 :]
            low, high = (
                np.maximum(self.start[one], self.start[others]),
                np.minimum(self.stop[one], self.stop[others]),
            )
            meeting = others[(low < high).all(axis=1)]
            if len(meeting):
                return self.piece(int(one)).box, self.piece(int(meeting[0])).box
        return None

    def moved(self, by: Sequence[int]) -> Fragments:
        """Return the same places for a tensor in which everything is ``by`` elements further along each axis."""
        shift = np.array(by, dtype=np.int64)
        return Fragments(self.start + shift, self.stop + shift, self.part, self.offset, self.strides)

    def permuted(self, axes: Sequence[int]) -> Fragments:
        """Return the pieces of the tensor whose axis ``i`` is this one's axis ``axes[i]``."""
        order = list(axes)
        return Fragments(
            self.start[:, order], self.stop[:, order], self.part, self.offset, self.strides[:, order]
        )

    def lifted(self, index: int) -> Fragments:
        """Return the pieces of the slice ``index`` of a tensor with one more axis, in front."""
        first = np.full((len(self), 1), index, dtype=np.int64)
        return Fragments(
            np.hstack([first, self.start]), np.hstack([first + 1, self.stop]),
            self.part, self.offset, np.hstack([np.zeros_like(first), self.strides]),
        )  # fmt: skip

    def sliced(self, index: int) -> Fragments:
        """Return the pieces of slice ``index`` along the first axis, as a tensor of its own."""
        box = Region(
            (index, *[0] * (self.rank - 1)), (index + 1, *self.stop[:, 1:].max(axis=0, initial=0).tolist())
        )
        inside = self.within(box)
        return Fragments(
            inside.start[:, 1:], inside.stop[:, 1:], inside.part, inside.offset, inside.strides[:, 1:]
        )

    def through(self, cut: Iterable[tuple[Region, Region]]) -> Fragments:
        """Return these pieces of a rank's local tensor as pieces of the whole tensor.

        ``cut`` lists what the rank holds: each first box of the whole tensor is at the second box of the local one.
        """
        moved = [
            self.within(local).moved([g - s for g, s in zip(box.start, local.start, strict=True)])
            for box, local in cut
        ]
        return joined(moved, self.rank)


def joined(many: Sequence[Fragments], rank: int) -> Fragments:
    """Return all of ``many``, pieces of one tensor of ``rank`` axes, as one."""
    if not many:
        return Fragments.of((), rank)
    return Fragments(
        *(np.concatenate([getattr(pieces, column) for pieces in many]) for column in
          ("start", "stop", "part", "offset", "strides"))
    )  # fmt: skip


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def dense(box: Region, part: int, offset: int = 0) -> Fragment:
    """Return the piece of ``box`` in C order, from the element ``offset`` of the part on."""
    return Fragment(box, part, offset, row_major(box.shape))


def flat(shape: Sequence[int], start: int, stop: int, part: int, offset: int = 0) -> list[Fragment]:
    """Return the pieces of the elements ``start`` to ``stop`` of a flattened tensor.

    These elements are in the part from ``offset`` on. There are at most 2 r - 1 pieces for r axes.
    """
    strides = row_major(shape)
    return [
        Fragment(box, part, offset - start + sum(map(int.__mul__, box.start, strides)), strides)
        for box in flat_boxes(shape, start, stop)
    ]
