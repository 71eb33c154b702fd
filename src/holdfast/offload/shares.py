"""Shares: how the tensors of a unit are divided over the ranks that train together.

The tensors lie one after the other, and a rank has one range of them all, so that its share of whatever is laid out in
their order (working copy, gradients) is one range of bytes. A tensor is cut only between rows, and only where a
multiple of 4096 elements ends: there torch's fused kernels give the bits that they give on the whole tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import lcm, prod
from typing import NamedTuple

GRAIN = 4096
"""Elements."""


class Part(NamedTuple):
    """Of the tensor number ``index``: the elements from ``start`` to ``stop``, whole rows."""

    index: int
    start: int
    stop: int


def divided(tensors: Sequence[tuple[tuple[int, ...], bool]], world_size: int) -> list[list[Part]]:
    """By rank what it has of ``tensors``, given by their shapes and whether they may be cut: about as many elements
    each.

    >>> divided([((64, 128), True), ((64,), True)], 2)
    [[Part(index=0, start=0, stop=4096)], [Part(index=0, start=4096, stop=8192), Part(index=1, start=0, stop=64)]]
    """
    bounds = list(accumulate((prod(shape) for shape, _ in tensors), initial=0))
    total = bounds[-1]
    inner = [_nearest(tensors, bounds, total * rank / world_size) for rank in range(1, world_size)]
    return [
        _between(bounds, first, last, rank == world_size - 1)
        for rank, (first, last) in enumerate(pairwise([0, *inner, total]))
    ]


def _nearest(tensors: Sequence[tuple[tuple[int, ...], bool]], bounds: list[int], target: float) -> int:
    """The place nearest to ``target`` where a rank's range may end."""
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


def _between(bounds: list[int], first: int, last: int, is_last: bool) -> list[Part]:
    """What lies from ``first`` to ``last``. A tensor of no elements is where the next one begins."""
    parts = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        begin, end = max(start, first), min(stop, last)
        empty = start == stop and (first <= start < last or (is_last and start == last))
        if begin < end or empty:
            parts.append(Part(index, begin - start, end - start))
    return parts
