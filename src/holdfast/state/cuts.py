"""Cuts: how one tensor is divided over ranks.

For each rank a list of pairs: the region of the whole tensor that the rank holds, and where it lies in
the rank's own tensor. Every layout compiles to such pairs; nothing downstream knows any other form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .boxes import Box


@dataclass(frozen=True)
class Piece:
    """``whole`` of the consolidated tensor lies at ``local`` in the rank's tensor; equal shapes."""

    whole: Box
    local: Box

    def __post_init__(self) -> None:
        if self.whole.shape != self.local.shape:
            raise ValueError(f"a piece of shape {self.whole.shape} cannot lie in {self.local.shape}")


@dataclass(frozen=True)
class Cut:
    """The pieces of a tensor of ``shape``, by rank."""

    shape: tuple[int, ...]
    ranks: tuple[tuple[Piece, ...], ...]

    @classmethod
    def replicate(cls, shape: tuple[int, ...], world_size: int = 1) -> Cut:
        """Every rank holds the whole tensor."""
        whole = Box.whole(shape)
        return cls(shape, ((Piece(whole, whole),),) * world_size)

    @classmethod
    def shard(cls, shape: tuple[int, ...], dim: int, widths: Sequence[int]) -> Cut:
        """Rank ``r`` holds ``widths[r]`` consecutive slices along ``dim``. Widths are stored, never
        recomputed, since frameworks disagree about uneven ones.

        >>> [rank[0].whole.start for rank in Cut.shard((5, 2), 0, [3, 2]).ranks]
        [(0, 0), (3, 0)]
        """
        if sum(widths) != shape[dim]:
            raise ValueError(f"widths {list(widths)} do not add up to {shape[dim]} along axis {dim}")
        ranks, begin = [], 0
        for width in widths:
            extent = tuple(width if d == dim else s for d, s in enumerate(shape))
            local = Box.whole(extent)
            offset = tuple(begin if d == dim else 0 for d in range(len(shape)))
            ranks.append((Piece(local.moved(offset), local),) if width else ())
            begin += width
        return cls(shape, tuple(ranks))

    def missing(self) -> int:
        """Elements of the tensor that no rank holds, assuming that distinct pieces do not overlap."""
        held = {piece.whole for rank in self.ranks for piece in rank}
        return Box.whole(self.shape).elements - sum(box.elements for box in held)
