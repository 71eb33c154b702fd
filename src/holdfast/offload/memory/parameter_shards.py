"""The parameters of a unit, the shard of each that one rank holds, and their places in the layout of the unit.

The tensors of a unit lie one after another, and a rank has one range of all of them, so its shard of everything laid
out in their order (compute copy, gradients) is one range of bytes. A tensor is divided only between rows, and only at a
multiple of 4096 elements: there torch's fused kernels give the same bits as on the whole tensor. A process that trains
by itself has every parameter whole. Called by ``block_states``. Offsets are bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm, prod
from typing import NamedTuple

import torch

from ...optim.declared_state import Form
from ...quantities import PAGE, round_up
from ...state.layout.regions import Region
from ..model.blocks import Owned


@dataclass(frozen=True, eq=False)
class ParameterEntry:
    """One parameter of a unit, with its offsets in bytes. ``grad_offset`` is -1 for a frozen one."""

    owned: Owned
    copy_offset: int
    grad_offset: int
    copy_dtype: torch.dtype
    """The dtype in which the parameter is computed with."""

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of its values outside of files and copies: fp32, or its own if it is kept as stored."""
        return self.copy_dtype if self.owned.captured.as_stored else torch.float32

    @cached_property
    def name(self) -> str:
        return self.owned.captured.name

    @cached_property
    def trained(self) -> bool:
        return self.owned.captured.trained

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.owned.captured.shape

    @cached_property
    def elements(self) -> int:
        return self.owned.captured.parameter.numel()

    @cached_property
    def group(self) -> int:
        assert self.owned.captured.group is not None
        return self.owned.captured.group

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """Dims from the slowest to the fastest in memory, as for ``channels_last``; None if contiguous.

        Kernels, and so the last bits, depend on the order: compute copies have it, and files do not.
        """
        return memory_order(self.owned.captured.parameter)

    def arranged(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements in ``flat`` in the parameter's shape, laid out as the parameter is."""
        if self.order is None:
            return flat.view(self.shape)
        there = flat.view([self.shape[dim] for dim in self.order])
        return there.permute([self.order.index(dim) for dim in range(len(self.order))])


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims of ``tensor`` from the slowest to the fastest in memory; None if that is their order."""
    strides = torch.empty_like(tensor, device="meta").stride()  # those of a clone, without gaps
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    order = sorted(dims, key=lambda dim: -strides[dim])
    if order == dims or not tensor.numel():
        return None
    return (*(dim for dim, size in enumerate(tensor.shape) if size == 1), *order)


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """Elements ``start`` to ``stop`` of a parameter, which are whole rows.

    ``copy_at`` is their offset in this rank's shard of the compute copy, ``grad_at`` that in its shard of the
    gradients; -1 for a frozen parameter.
    """

    member: ParameterEntry
    start: int
    stop: int
    copy_at: int
    grad_at: int

    @cached_property
    def name(self) -> str:
        return self.member.name

    @cached_property
    def group(self) -> int:
        return self.member.group

    @cached_property
    def elements(self) -> int:
        return self.stop - self.start

    @cached_property
    def is_whole(self) -> bool:
        return self.elements == self.member.elements

    @cached_property
    def box(self) -> Region:
        """The fragment's region of the parameter."""
        shape = self.member.shape
        if self.is_whole:
            return Region.whole(shape)
        width = prod(shape[1:])
        return Region((self.start // width, *(0 for _ in shape[1:])), (self.stop // width, *shape[1:]))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape

    def box_in(self, form: Form) -> Region:
        """Return the fragment's region of an optimizer state tensor, given the tensor's form for the whole
        parameter."""
        if self.is_whole:
            return Region.whole(tuple(form.shape))
        if form.every == 1:
            return self.box
        return Region((self.start // form.every,), (-(-self.stop // form.every),))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fragment's part of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor[self.box.slices]


def divided(tensors: Sequence[tuple[tuple[int, ...], bool]], world_size: int) -> list[list[RowRange]]:
    """Return, for each rank, its parts of ``tensors``: about as many elements each.

    Each tensor is given by its shape and whether it may be divided.

    >>> for shares in divided([((64, 128), True), ((64,), True)], 2):
    ...     print(*shares)
    RowRange(index=0, start=0, stop=4096)
    RowRange(index=0, start=4096, stop=8192) RowRange(index=1, start=0, stop=64)
    """
    bounds = list(accumulate((prod(shape) for shape, _ in tensors), initial=0))
    total = bounds[-1]
    inner = [_nearest(tensors, bounds, total * rank / world_size) for rank in range(1, world_size)]
    return [
        _between(bounds, first, last, rank == world_size - 1)
        for rank, (first, last) in enumerate(pairwise([0, *inner, total]))
    ]


class RowRange(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor number ``index``, which are whole rows."""

    index: int
    start: int
    stop: int


def joined(shares: Sequence[Sequence[RowRange]]) -> list[RowRange]:
    """Return consecutive parts with those of one tensor together.

    >>> joined([[RowRange(0, 0, 4)], [RowRange(0, 4, 8), RowRange(1, 0, 2)]])
    [RowRange(index=0, start=0, stop=8), RowRange(index=1, start=0, stop=2)]
    """
    found: list[RowRange] = []
    for part in (part for share in shares for part in share):
        if found and found[-1].index == part.index:
            found[-1] = found[-1]._replace(stop=part.stop)
        else:
            found.append(part)
    return found


GRAIN = 4096
"""Elements."""


class CopyPart(NamedTuple):
    """A contiguous range of a rank's shard of the compute copy.

    It begins at ``at`` in the shard, and goes from ``start`` to ``stop`` in the whole copy. It consists of whole pages,
    so both ends may contain bytes of neighbours, which are ignored.
    """

    at: int
    start: int
    stop: int

    @property
    def end(self) -> int:
        return self.at + self.stop - self.start


def range_of(
    members: Sequence[ParameterEntry],
    parts: Sequence[RowRange],
    place: Callable[[ParameterEntry], tuple[int, int]],
) -> tuple[int, int]:
    """Return the byte range from the first to the last of ``parts``.

    ``place`` returns a member's offset, and the bytes of one of its elements.
    """
    if not parts:
        return 0, 0
    first, last = parts[0], parts[-1]
    (start, size), (end, end_size) = place(members[first.index]), place(members[last.index])
    return start + first.start * size, end + last.stop * end_size


def copy_parts(ranges: Sequence[tuple[int, int]]) -> list[CopyPart]:
    """Return the whole pages that hold ``ranges``, one after another."""
    found, at = [], 0
    for start, stop in ranges:
        first = start // PAGE * PAGE
        end = round_up(stop) if stop > start else first
        found.append(CopyPart(at, first, end))
        at += end - first
    return found


def _nearest(tensors: Sequence[tuple[tuple[int, ...], bool]], bounds: list[int], target: float) -> int:
    """Return the place nearest to ``target`` where a rank's range may end."""
    index = min(bisect_right(bounds, target), len(tensors)) - 1
    if index < 0:
        return 0
    (shape, cut), start, stop = tensors[index], bounds[index], bounds[index + 1]
    places = [start, stop]
    if cut and shape and prod(shape):
        grain = lcm(prod(shape[1:]), GRAIN)
        below = start + int((target - start) // grain) * grain
        places += [place for place in (below, below + grain) if place < stop]
    return min(sorted(places), key=lambda place: abs(place - target))


def _between(bounds: list[int], first: int, last: int, is_last: bool) -> list[RowRange]:
    """Return the parts from ``first`` to ``last``. A tensor of no elements lies where the next one begins."""
    parts = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        begin, end = max(start, first), min(stop, last)
        empty = start == stop and (first <= start < last or (is_last and start == last))
        if begin < end or empty:
            parts.append(RowRange(index, begin - start, end - start))
    return parts
