"""The sparse form of a flat tensor: the values of some of its elements, and their places.

An element's place is its block and a 16-bit index within the block. A block has ``BLOCK`` elements, the last one of a
tensor fewer, and a count of its stored elements. A block that stores all its elements needs no indices. Missing
elements are +0.0. Any element may be stored, zeros as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

Arrays = dict[str, torch.Tensor]
"""Flat arrays by name. Those of several parameters, one behind the other, make a part of a log record."""
Take = Callable[[str, torch.dtype, int], torch.Tensor]
"""Returns the next so many elements of the array of that name and dtype."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of so many bytes."""


def num_blocks(elements: int, block: int) -> int:
    return -(-elements // block)


def lengths_of(elements: int, block: int, device: torch.device) -> torch.Tensor:
    """Return the number of elements in each block."""
    lengths = torch.full((num_blocks(elements, block),), block, device=device)
    if elements % block:
        lengths[-1] = elements % block
    return lengths


def pick(flat: torch.Tensor, chosen: torch.Tensor, block: int) -> Arrays:
    """Return the elements of ``flat`` where ``chosen`` is true; a whole block where that takes no more bytes."""
    lengths, size = lengths_of(flat.numel(), block, flat.device), flat.element_size()
    places, counts = _places_of(chosen, block)
    whole = counts * (2 + size) >= lengths * size
    if bool(whole.any()):
        chosen = chosen | torch.repeat_interleave(whole, lengths)
        places, counts = _places_of(chosen, block)
    starts = torch.arange(len(counts), device=flat.device) * block
    within = places - torch.repeat_interleave(starts, counts)
    if bool(whole.any()):
        within = within[~torch.repeat_interleave(whole, counts)]
    return {
        "counts": counts.to(torch.uint16),
        "indices": within.to(torch.uint16),
        "values": flat[places],
    }


def _places_of(chosen: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places where ``chosen`` is true, and their number in each block."""
    if chosen.device.type == "cpu":  # several times as fast as torch's version
        places = torch.from_numpy(np.flatnonzero(chosen.numpy()))
    else:
        places = chosen.nonzero().squeeze(1)
    edges = torch.arange(num_blocks(chosen.numel(), block) + 1, device=chosen.device) * block
    return places, torch.searchsorted(places, edges).diff()


def spread(take: Take, elements: int, dtype: torch.dtype, block: int) -> torch.Tensor:
    """Return the flat tensor whose arrays ``take`` gives."""
    places, values = _located(take, elements, dtype, block)
    flat = torch.zeros(elements, dtype=dtype, device=values.device)
    flat[places] = values
    return flat


def spread_into(flat: torch.Tensor, take: Take, block: int) -> torch.Tensor:
    """Write the tensor whose arrays ``take`` gives into ``flat``.

    Returns the places of its stored elements; all others are +0.0.
    """
    places, values = _located(take, flat.numel(), flat.dtype, block)
    flat.zero_()[places] = values
    return places


def _located(take: Take, elements: int, dtype: torch.dtype, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the elements that ``take`` gives, and their values."""
    counts = take("counts", torch.uint16, num_blocks(elements, block))
    lengths = lengths_of(elements, block, counts.device)
    starts = torch.arange(counts.numel(), device=counts.device) * block
    return _taken(take, counts, lengths, starts, dtype)


def _taken(
    take: Take, counts: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places and the values of elements, for blocks of ``lengths`` that begin at ``starts``."""
    counts = counts.to(torch.int64)
    whole = counts == lengths
    values = take("values", dtype, int(counts.sum()))
    within = take("indices", torch.uint16, int(counts[~whole].sum())).to(torch.int64)
    if bool(whole.any()):
        of_whole = torch.repeat_interleave(whole, counts)
        each = torch.arange(values.numel(), device=counts.device)
        each -= torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        each[~of_whole] = within
        within = each
    return torch.repeat_interleave(starts, counts) + within, values


class SparseScratch:
    """Flat tensors of several parameters, of ``sizes`` elements, whose memory is reused from record to record.

    Each has the values that ``spread`` gives. Only what the record before wrote is cleared.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, block: int, device: torch.device) -> None:
        self._dtype = dtype
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._lengths = torch.cat([lengths_of(size, block, device) for size in sizes])
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._written, self._version = torch.empty(0, dtype=torch.int64, device=device), self._flat._version
        self.tensors = self._flat.split(list(sizes))

    def fill(self, take: Take) -> None:
        """Set all tensors from the arrays that ``take`` gives, one parameter behind the other."""
        counts = take("counts", torch.uint16, len(self._lengths))
        places, values = _taken(take, counts, self._lengths, self._starts, self._dtype)
        if self._flat._version == self._version:
            self._flat[self._written] = 0
        else:  # the optimizer changed them; fused kernels unscale unnoticed, and zeros stay zeros
            self._flat.zero_()
        self._flat[places] = values
        self._written, self._version = places, self._flat._version
