"""Sparse: a flat tensor as the values of some of its elements, and where they are.

An element's place is its block and a 16-bit index in it; a block of ``BLOCK`` elements (the last one of a tensor is
shorter) says how many it has. One that has all its elements needs no indices. Elements that are not there are +0.0,
and any element may be there, zeros as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

Arrays = dict[str, torch.Tensor]
"""Flat tensors by what they are: those of several parameters, one behind the other, make a part of a record."""

Take = Callable[[str, torch.dtype, int], torch.Tensor]
"""The next so many elements of the array of that name and dtype."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of so many bytes."""


def num_blocks(elements: int, block: int) -> int:
    return -(-elements // block)


def lengths_of(elements: int, block: int, device: torch.device) -> torch.Tensor:
    """How many elements each block has."""
    lengths = torch.full((num_blocks(elements, block),), block, device=device)
    if elements % block:
        lengths[-1] = elements % block
    return lengths


def pick(flat: torch.Tensor, chosen: torch.Tensor, block: int) -> Arrays:
    """The elements of ``flat`` where ``chosen`` is true, and all of a block where that takes no more bytes."""
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
    """Where ``chosen`` is true, and in each block how often."""
    if chosen.device.type == "cpu":  # several times as fast as torch's
        places = torch.from_numpy(np.flatnonzero(chosen.numpy()))
    else:
        places = chosen.nonzero().squeeze(1)
    edges = torch.arange(num_blocks(chosen.numel(), block) + 1, device=chosen.device) * block
    return places, torch.searchsorted(places, edges).diff()


def spread(take: Take, elements: int, dtype: torch.dtype, block: int) -> torch.Tensor:
    """The flat tensor that ``take`` gives the arrays of."""
    places, values = _located(take, elements, dtype, block)
    flat = torch.zeros(elements, dtype=dtype, device=values.device)
    flat[places] = values
    return flat


def spread_into(flat: torch.Tensor, take: Take, block: int) -> torch.Tensor:
    """Make ``flat`` that tensor. Returns where it has elements; all others are +0.0."""
    places, values = _located(take, flat.numel(), flat.dtype, block)
    flat.zero_()[places] = values
    return places


def _located(take: Take, elements: int, dtype: torch.dtype, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of the elements that ``take`` gives, and their values."""
    counts = take("counts", torch.uint16, num_blocks(elements, block))
    lengths = lengths_of(elements, block, counts.device)
    starts = torch.arange(counts.numel(), device=counts.device) * block
    return _taken(take, counts, lengths, starts, dtype)


def _taken(
    take: Take, counts: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where elements are, and their values; of blocks of ``lengths`` that begin at ``starts``."""
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


class Spread:
    """The flat tensors of several parameters, of ``sizes`` elements, as ``spread`` gives each, for one record after the
    other: their memory is used again, and of it only what the record before wrote is cleared."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, block: int, device: torch.device) -> None:
        self._dtype = dtype
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._lengths = torch.cat([lengths_of(size, block, device) for size in sizes])
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._written, self._version = torch.empty(0, dtype=torch.int64, device=device), self._flat._version
        self.tensors = self._flat.split(list(sizes))

    def fill(self, take: Take) -> None:
        """``take`` gives the arrays of all parameters, one behind the other."""
        counts = take("counts", torch.uint16, len(self._lengths))
        places, values = _taken(take, counts, self._lengths, self._starts, self._dtype)
        if self._flat._version == self._version:
            self._flat[self._written] = 0
        else:  # the optimizer made something else of them; fused kernels unscale unseen, and zeros stay zeros
            self._flat.zero_()
        self._flat[places] = values
        self._written, self._version = places, self._flat._version
