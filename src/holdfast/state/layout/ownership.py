"""The region of each tensor that this process holds, and the process that stores it.

A tensor that is not distributed is held whole. What several ranks hold alike, as in DDP, one of them stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch

from ...errors import ModelNotSupported
from .regions import AnyRegion, Region


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a ``DTensor``."""
    return hasattr(tensor, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of ``tensor``, in the same memory."""
    return cast(Any, tensor).to_local() if is_distributed(tensor) else tensor


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
