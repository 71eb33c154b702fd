"""Gradients of many parameters in one matrix, so that a device compresses all of them in few operations.

A device needs some microseconds to start an operation of any size. A question from the host, such as the number of
nonzero elements, waits for everything started before. So gradients of one dtype on a device are laid out together, and
every count follows from shapes alone.

Invariant: what training consumes and what a log record holds have the bits of compressing each parameter by itself, as
``lossy.Lossy`` does on the host. Called by the training thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...quantities import packed
from ...state.layout.regions import local_of
from .sparse import num_blocks

ELEMENTS_AT_ONCE = 1 << 26
"""The number of elements in one matrix, which bounds the device memory that compression takes."""

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Grid:
    """The layout of flat tensors with ``sizes`` elements in one matrix with rows of ``width``.

    Each tensor begins a row, and zeros fill the rest of its last row.
    """

    sizes: tuple[int, ...]
    width: int

    @property
    def rows(self) -> list[int]:
        """The number of rows of each tensor."""
        return [num_blocks(size, self.width) for size in self.sizes]

    def filled(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new matrix that holds ``flats``."""
        zeros, pieces = flats[0].new_zeros(self.width), []
        for flat, rows in zip(flats, self.rows, strict=True):
            pieces += [flat, zeros[: rows * self.width - flat.numel()]]
        return torch.cat(pieces).view(-1, self.width)

    def parts(self, matrix: torch.Tensor, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return views of the first elements of each tensor in ``matrix``: ``sizes``, or all of its own.

        The matrix may have fewer columns than the grid.
        """
        places = [rows * matrix.shape[1] for rows in self.rows]
        pairs = zip(places, self.sizes if sizes is None else sizes, strict=True)
        return list(matrix.view(-1).split([n for place, size in pairs for n in (size, place - size)])[::2])


@dataclass(frozen=True)
class Tails:
    """The incomplete last rows of tensors, and the number of elements that each row of the grid keeps."""

    rows: torch.Tensor
    """The row numbers of the tails."""
    is_there: torch.Tensor
    """(tails, width), whether an element belongs to the tensor."""
    is_whole: torch.Tensor
    """(tails, 1), whether all elements of the tail are kept. They are then kept in order."""
    kept: torch.Tensor
    """(rows of the grid, 1), the number of elements kept of each row."""
    counts: tuple[torch.Tensor, ...]
    """``kept`` in the form that records store, by tensor."""


@lru_cache(maxsize=64)
def tails_of(grid: Grid, kept_of_row: int, kept_of_tails: tuple[int, ...], device: torch.device) -> Tails:
    """Return the constants of ``grid`` that every step needs, on ``device``.

    Cached, because sending them would wait for the device.

    Args:
        kept_of_row: The number of elements that a whole row keeps.
        kept_of_tails: The number of elements that the tail of each tensor keeps; 0 where there is no tail.
    """
    ends = torch.tensor(grid.rows, dtype=torch.int64, device="cpu").cumsum(0) - 1
    lengths = torch.tensor(grid.sizes, dtype=torch.int64, device="cpu") % grid.width
    tail_kept = torch.tensor(kept_of_tails, dtype=torch.int64, device="cpu")
    has_tail = lengths > 0
    ends, lengths, tail_kept = ends[has_tail], lengths[has_tail], tail_kept[has_tail]
    kept = torch.full((sum(grid.rows),), kept_of_row, dtype=torch.int64, device="cpu")
    kept[ends] = tail_kept
    return Tails(
        ends.to(device),
        (torch.arange(grid.width, device="cpu") < lengths[:, None]).to(device),
        (tail_kept == lengths)[:, None].to(device),
        kept[:, None].to(device),
        kept.to(torch.uint16).to(device).split(grid.rows),
    )


def largest_places(rows: torch.Tensor, kept: int, tails: Tails) -> torch.Tensor:
    """Return the indices of the ``kept`` largest elements in each of ``rows``, the largest first.

    In a tail the first indices are the tensor's own; a tail that is kept whole has them in order.
    """
    magnitudes = rows.abs()
    order = torch.arange(rows.shape[1], 0, -1, dtype=rows.dtype, device=rows.device)
    own = torch.where(tails.is_whole, order, magnitudes.index_select(0, tails.rows))
    magnitudes.index_copy_(0, tails.rows, torch.where(tails.is_there, own, -1.0))
    return magnitudes.topk(kept, dim=1).indices


def alike(trained: Named) -> Iterator[Named]:
    """Yield groups of parameters whose gradients are compressed at once: of one device and dtype, of bounded size."""
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in trained:
        grad = gradient_of(parameter)
        kinds.setdefault((grad.device, grad.dtype), []).append((name, parameter))
    for of_kind in kinds.values():
        yield from packed(of_kind, lambda pair: pair[1].numel(), ELEMENTS_AT_ONCE)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a parameter's gradient."""
    assert parameter.grad is not None
    return local_of(parameter.grad.detach())


def residuals_of(
    trained: Named, residuals: dict[torch.Tensor, torch.Tensor], wide: torch.dtype
) -> list[torch.Tensor]:
    """Return the flat residuals of the parameters; new ones are zero."""
    for _, parameter in trained:
        if parameter not in residuals:
            grad = gradient_of(parameter)
            residuals[parameter] = torch.zeros(grad.shape, dtype=wide, device=grad.device)
    return [residuals[parameter].view(-1) for _, parameter in trained]


def give(trained: Named, given: Sequence[torch.Tensor]) -> None:
    """Copy the flat tensors ``given`` into the gradients."""
    there: Mapping[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {True: [], False: []}
    for (_, parameter), flat in zip(trained, given, strict=True):
        grad = gradient_of(parameter)
        if torch._debug_has_internal_overlap(grad):  # an expanded view cannot be written to
            parameter.grad = flat.clone().view(grad.shape)
        else:
            there[grad.is_contiguous()].append((grad, flat.view(grad.shape)))
    for pairs in there.values():
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(list(targets), list(sources))
