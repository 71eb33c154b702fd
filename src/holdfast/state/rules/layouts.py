"""The index arithmetic of sharding.

Numbers in, spans and regions out, all in elements. A span is the start and stop of something along one dim. Three rules
divide a length unevenly, each in its own way, so stored widths are compared with those of the rule and never taken for
granted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..layout.regions import Region

Span = tuple[int, int]
WIDTHS = ("even", "ceil", "balanced")


def widths_of(rule: str, size: int, count: int) -> list[int]:
    """Return the widths by which ``size`` is divided into ``count`` parts.

    ``even`` gives equal widths, ``ceil`` those of torch.chunk, ``balanced`` one more to each of the first parts.

    >>> widths_of("ceil", 10, 4), widths_of("balanced", 10, 4)
    ([3, 3, 3, 1], [3, 3, 2, 2])
    """
    if rule == "even":
        if size % count:
            raise ValueError(f"{size} is not divided evenly by {count}")
        return [size // count] * count
    if rule == "ceil":
        width = -(-size // count)
        return [max(0, min(width, size - number * width)) for number in range(count)]
    return [size // count + (number < size % count) for number in range(count)]


def spans(widths: Sequence[int]) -> list[Span]:
    """Return the spans of ``widths``, one after the other.

    >>> spans([2, 0, 3])
    [(0, 2), (2, 2), (2, 5)]
    """
    return list(pairwise(accumulate(widths, initial=0)))


def repeated(size: int, count: int, units: int) -> list[Span]:
    """Return the span that each of ``count`` ranks holds of ``units`` heads.

    It is an equal part, or, where there are more ranks than heads, the one head that the rank needs.

    >>> repeated(20, 4, 2)
    [(0, 10), (0, 10), (10, 20), (10, 20)]
    """
    if units < 1:
        raise ValueError(f"{units} heads are shared by {count}: repeat is the number of heads, 1 or more")
    if size % units or max(count, units) % min(count, units):
        raise ValueError(f"{units} heads of {size} elements in all are not shared by {count}")
    width = size // min(count, units)
    first = [number * units // count if count > units else number for number in range(count)]
    return [(number * width, (number + 1) * width) for number in first]


def along(shape: Sequence[int], dim: int, span: Span) -> Region:
    """Return the region of all that is in ``span`` along ``dim``.

    >>> along((4, 6), 1, (2, 5)).to_json()
    [[0, 2], [4, 5]]
    """
    start, stop = [0] * len(shape), list(shape)
    start[dim], stop[dim] = span
    return Region(tuple(start), tuple(stop))


def interleaved(heads: int, kv_heads: int, head_dim: int) -> list[tuple[Span, Span]]:
    """Return the row spans of a fused projection in block layout and in interleaved layout.

    The block layout is [Q; K; V]. The interleaved one has, for each key-value head, its query heads, the key head and
    the value head.

    >>> interleaved(4, 2, 1)[:3]
    [((0, 2), (0, 2)), ((4, 5), (2, 3)), ((6, 7), (3, 4))]
    """
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not shared by {kv_heads} key-value heads")
    queries = heads // kv_heads
    found = []
    for group in range(kv_heads):
        first = group * (queries + 2)
        blocks = (group * queries, queries), (heads + group, 1), (heads + kv_heads + group, 1)
        places = first, first + queries, first + queries + 1
        for (block, n), place in zip(blocks, places, strict=True):
            found.append(
                (
                    (block * head_dim, (block + n) * head_dim),
                    (place * head_dim, (place + n) * head_dim),
                )
            )
    return found


class FlatShare(NamedTuple):
    """The elements ``start`` to ``stop`` of a flattened tensor, from ``offset`` on in the part of ``rank``."""

    rank: int
    tensor: int
    start: int
    stop: int
    offset: int


def flat_shares(
    sizes: Sequence[int], world: int, *, buckets: Sequence[int], align: int, tensor_align: int
) -> tuple[list[FlatShare], int]:
    """Return the places of tensors of ``sizes`` elements in flat partitions, and the elements of each rank.

    In each bucket, every tensor is padded to a multiple of ``tensor_align``, then all of them to a multiple of
    ``align``. Each rank has an equal part of each bucket, one after the other. ``buckets`` gives the number of
    tensors in each.

    >>> shares, size = flat_shares([3, 4], 2, buckets=[2], align=2, tensor_align=1)
    >>> size, *shares[1:]
    (4, FlatShare(rank=0, tensor=1, start=0, stop=1, offset=3), FlatShare(rank=1, tensor=1, start=1, stop=4, offset=0))
    """
    if align < 1 or tensor_align < 1:
        raise ValueError(f"nothing is a multiple of {min(align, tensor_align)}: it is aligned to 1 or more")
    if align % world:
        raise ValueError(f"a bucket that is a multiple of {align} is not divided by {world} ranks")
    found, tensor, base = [], 0, 0
    for number in buckets:
        starts = list(accumulate((_up(n, tensor_align) for n in sizes[tensor : tensor + number]), initial=0))
        share = _up(starts[-1], align) // world
        for start, size in zip(starts, sizes[tensor : tensor + number]):
            for rank in range(start // share, -(-(start + size) // share)) if size else ():
                low, high = max(start, rank * share), min(start + size, (rank + 1) * share)
                found.append(FlatShare(rank, tensor, low - start, high - start, base + low - rank * share))
            tensor += 1
        base += share
    return found, base


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
