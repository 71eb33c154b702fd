"""Sharding of a unit's tensors over the ranks that train together.

The tensors lie one after another, and a rank has one range of all of them. So its shard of everything laid out in their
order (compute copy, gradients) is one range of bytes. A tensor is divided only between rows, and only at a multiple of
4096 elements: there torch's fused kernels give the same bits as on the whole tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import lcm, prod
from typing import NamedTuple

GRAIN = 4096
"""Elements."""


class RowRange(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor number ``index``, which are whole rows."""

    index: int
    start: int
    stop: int


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
