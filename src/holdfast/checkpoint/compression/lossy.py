"""The lossy codecs: training consumes a gradient that takes few bytes, and what that loses is added later.

The loss of a gradient is kept as the parameter's *residual* and added to its next gradient (error feedback). The
optimizer consumes what ``codecs.expand_into`` makes of the recorded arrays, and replay expands the same arrays. Called
by the optimizer hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...accelerators import is_accelerator
from ...errors import BadInput, ModelNotSupported
from ...state.layout.regions import local_of
from ...state.live_state import LiveState
from ...state.plain_tensors import TO_NAME
from ...store.format.payload_layout import METADATA, Layout
from ..capture.staging_buffers import StagingBuffer
from .codecs import (
    ArrayReader,
    Codec,
    Trained,
    array_key,
    expand_into,
    quantise,
    quantise_rows,
    scaled_rows,
    trained_of,
)
from .grids import Grid, alike, give, gradient_of, largest_places, residuals_of, tails_of
from .sparse import BITS, Arrays, num_blocks, pick

Sizes = dict[str, tuple[torch.dtype, int]]
"""The dtype and the number of elements of each array of a parameter."""
RANKED_AT_ONCE = 1 << 18
"""The number of magnitudes that each CPU thread compares at once, so that they stay in its caches."""
BLOCK = 1024
"""The elements among which the largest are chosen: few enough to be fast, and to index in 16 bits."""


class Lossy(Codec):
    """The base class of lossy codecs: ``compress`` makes arrays, and ``codecs.expand`` gives what they stand for."""

    @property
    def changes_training(self) -> bool:
        return True

    def compress(self, flat: torch.Tensor, dtype: torch.dtype) -> Arrays:
        """Return the arrays that stand for ``flat``, whose gradient has ``dtype``."""
        raise NotImplementedError

    def sizes(self, elements: int, dtype: torch.dtype) -> Sizes:
        """Return the largest arrays that ``compress`` can give."""
        raise NotImplementedError

    def layouts(self, state: LiveState) -> list[Layout]:
        found = []
        for trained in trained_of(state):
            most: dict[str, tuple[torch.dtype, int]] = {}
            for parameter in trained:
                like = parameter.parameter
                if like.is_complex():
                    raise ModelNotSupported(
                        f"{parameter.name} is {like.dtype}, and {type(self).__name__} is for real numbers. Give it as"
                        " two of them (torch.view_as_complex in the model), or record with codec=holdfast.Exact()."
                    )
                elements = state.boxes[parameter.name].elements
                for name, (dtype, count) in self.sizes(elements, like.dtype).items():
                    key = array_key(name, dtype)
                    most[key] = (dtype, most.get(key, (dtype, 0))[1] + count)
            found.append(_layout_of(most))
        return found

    @torch.no_grad()
    def consume(
        self, trained: Trained, residuals: dict[torch.Tensor, torch.Tensor], skipped: bool
    ) -> dict[str, Arrays]:
        there = {p.device for _, p in trained} if self.width else set()
        together = {device for device in there if is_accelerator(device)}
        if not together:  # a CPU compresses each gradient in its caches
            return {name: self._consume(parameter, residuals, skipped) for name, parameter in trained}
        alone = [(name, p) for name, p in trained if p.device not in together]
        found = {name: self._consume(parameter, residuals, skipped) for name, parameter in alone}
        for group in alike([(name, p) for name, p in trained if p.device in together]):
            found |= self._consume_together(group, residuals, skipped)
        return {name: found[name] for name, _ in trained}

    def compress_rows(
        self, rows: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> tuple[list[Arrays], torch.Tensor]:
        """Compress all tensors of ``grid``, without waiting for the device.

        ``rows`` is the matrix of the grid. Returns the arrays that ``compress`` gives for each tensor, and a matrix of
        the values that they stand for, in ``dtype``.
        """
        raise NotImplementedError

    @property
    def width(self) -> int:
        """The columns of the grid for ``compress_rows``; 0 for a codec without that method."""
        return 0

    def _consume_together(
        self, trained: Trained, residuals: dict[torch.Tensor, torch.Tensor], skipped: bool
    ) -> dict[str, Arrays]:
        """Do what ``_consume`` does for all gradients of one dtype and device, in a fixed number of operations."""
        grads = [gradient_of(parameter) for _, parameter in trained]
        dtype, wide = grads[0].dtype, torch.promote_types(grads[0].dtype, torch.float32)
        grid = Grid(tuple(grad.numel() for grad in grads), self.width)
        rows = grid.filled([grad.reshape(-1) for grad in grads]).to(wide)
        if skipped:
            return _by_name(trained, self.compress_rows(rows.zero_(), grid, dtype)[0])
        kept = residuals_of(trained, residuals, wide) if self.error_feedback else []
        if kept:
            rows = grid.filled(kept).add_(rows)
        arrays, given = self.compress_rows(rows, grid, dtype)
        if kept:
            torch._foreach_copy_(kept, grid.parts(rows.sub_(given)))
        give(trained, grid.parts(given))
        return _by_name(trained, arrays)

    def _consume(
        self, parameter: torch.Tensor, residuals: dict[torch.Tensor, torch.Tensor], skipped: bool
    ) -> Arrays:
        assert parameter.grad is not None
        grad = local_of(parameter.grad.detach())
        wide = torch.promote_types(grad.dtype, torch.float32)
        if skipped:  # the optimizer changes nothing, whatever the gradient
            return self.compress(torch.zeros(grad.numel(), dtype=wide, device=grad.device), grad.dtype)
        wanted = grad.reshape(-1).to(wide)
        if self.error_feedback:
            if parameter not in residuals:
                residuals[parameter] = torch.zeros(grad.shape, dtype=wide, device=grad.device)
            wanted = residuals[parameter].view(-1).add_(wanted)
        arrays = self.compress(wanted, grad.dtype)
        given = grad.view(-1) if grad.is_contiguous() else torch.empty_like(wanted, dtype=grad.dtype)
        where = expand_into(self.about(), ArrayReader(_keyed(arrays)).on(grad.device), given)
        if self.error_feedback and where is None:
            wanted.sub_(given)
        elif self.error_feedback:
            wanted[where] -= given[where]
        if torch._debug_has_internal_overlap(grad):  # an expanded view cannot be written to
            parameter.grad = given.view(grad.shape)
        elif not grad.is_contiguous():
            grad.copy_(given.view(grad.shape))
        return arrays

    def write(self, slot: StagingBuffer, index: int, consumed: dict[str, Arrays]) -> memoryview | None:
        pieces: dict[str, list[torch.Tensor]] = {}
        for name in sorted(consumed):
            for key, array in _keyed(consumed[name]).items():
                pieces.setdefault(key, []).append(array)
        sizes = {key: (found[0].dtype, sum(map(torch.numel, found))) for key, found in pieces.items()}
        layout, part = _layout_of(sizes), slot.parts[index]
        if layout.file_bytes > len(part):
            return None
        part[: len(layout.header)] = layout.header
        entries = [entry for entry in layout.entries if entry.nbytes]
        joined = [torch.cat(pieces[entry.key]) for entry in entries]
        places = [
            torch.frombuffer(part[entry.offset : entry.end], dtype=array.dtype)
            for entry, array in zip(entries, joined, strict=True)
        ]
        slot.put(places, joined, lasting=True)
        return part[: layout.file_bytes]


@dataclass(frozen=True)
class TopK(Lossy):
    """A codec that keeps the largest elements of each gradient, a fraction ``ratio`` of all.

    Training consumes these elements, and zeros elsewhere. The largest are found within each block of 1024 elements, or
    of more where ``ratio`` is below 1 %. At least one element of each block and each parameter is kept.

    With ``error_feedback`` the rest is kept and added to the next gradient; without, it is lost, and training suffers.
    Residuals take 4 bytes per element, on the parameter's device.
    """

    ratio: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise BadInput(
                f"TopK({self.ratio}) keeps no part of a gradient: a ratio is above 0 and at most 1"
            )

    @property
    def block(self) -> int:
        """The number of elements in a block: enough to keep about ten of them."""
        block = BLOCK
        while block < 32 * BLOCK and block * self.ratio < 8:
            block *= 2
        return block

    def kept(self, elements: int) -> int:
        """Return how many elements are kept of a block, or a partial block, of so many ``elements``."""
        return min(elements, max(1, round(self.ratio * elements)))

    def counts(self, elements: int, device: torch.device) -> torch.Tensor:
        """Return how many elements ``compress`` keeps of each block of a tensor with so many ``elements``."""
        counts = torch.full((num_blocks(elements, self.block),), self.kept(self.block), device=device)
        if elements % self.block:
            counts[-1:] = self.kept(elements % self.block)
        return counts.to(torch.uint16)

    def sizes(self, elements: int, dtype: torch.dtype) -> Sizes:
        blocks, rest = divmod(elements, self.block)
        kept = blocks * self.kept(self.block) + (self.kept(rest) if rest else 0)
        return {
            "counts": (torch.uint16, num_blocks(elements, self.block)),
            "indices": (torch.uint16, kept),
            "values": (dtype, kept),
        }

    def compress(self, flat: torch.Tensor, dtype: torch.dtype) -> Arrays:
        whole = flat.numel() // self.block * self.block
        found = [self._largest(flat[:whole].view(-1, self.block), dtype)] if whole else []
        if whole < flat.numel():
            found.append(self._largest(flat[whole:].view(1, -1), dtype))
        if not found:
            empty = flat.new_empty(0)
            return {name: empty.to(kind) for name, (kind, _) in self.sizes(0, dtype).items()}
        return {name: torch.cat([arrays[name] for arrays in found]) for name in found[0]}

    def _largest(self, rows: torch.Tensor, dtype: torch.dtype) -> Arrays:
        """Return the arrays of the largest elements in each of ``rows``."""
        length = rows.shape[1]
        kept = self.kept(length)
        counts = torch.full((len(rows),), kept, device=rows.device).to(torch.uint16)
        if kept == length:
            indices, values = torch.empty(0, dtype=torch.uint16, device=rows.device), rows
        else:
            places = _largest_of(rows, kept)
            indices, values = places.to(torch.uint16).view(-1), rows.gather(1, places)
        return {"counts": counts, "indices": indices, "values": values.to(dtype).reshape(-1)}

    @property
    def width(self) -> int:
        return self.block

    def compress_rows(
        self, rows: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> tuple[list[Arrays], torch.Tensor]:
        kept = self.kept(self.block)
        of_tails = tuple(self.kept(size % self.block) if size % self.block else 0 for size in grid.sizes)
        tails = tails_of(grid, kept, of_tails, rows.device)
        if kept == self.block:  # each tail is then kept whole, too
            given = values = rows.to(dtype, copy=True)
            places = rows.new_empty((len(rows), 0), dtype=torch.uint16)
        else:
            found = largest_places(rows, kept, tails)
            values, places = rows.gather(1, found).to(dtype), found.to(torch.uint16)
            own = torch.arange(kept, device=rows.device) < tails.kept
            given = torch.zeros_like(rows, dtype=dtype).scatter_(1, found, torch.where(own, values, 0.0))
        whole = [size // self.block for size in grid.sizes]
        of_values = [n * kept + tail for n, tail in zip(whole, of_tails, strict=True)]
        of_places = [
            n * places.shape[1] + (tail if tail < size % self.block else 0)
            for n, tail, size in zip(whole, of_tails, grid.sizes, strict=True)
        ]
        return _each(
            counts=tails.counts, indices=grid.parts(places, of_places), values=grid.parts(values, of_values)
        ), given

    def about(self) -> dict[str, Any]:
        return {"kind": "sparse", "block": self.block, "feedback": self.error_feedback}


@dataclass(frozen=True)
class Int8(Lossy):
    """A codec that stores gradients in 8 bits per element, with one scale for each ``block`` of elements.

    With ``error_feedback`` the rounding loss is added to the next gradient.
    """

    block: int = 256
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput(f"Int8(block={self.block}): a block has at least one element")

    def sizes(self, elements: int, dtype: torch.dtype) -> Sizes:
        return {"scales": (torch.float32, num_blocks(elements, self.block)), "steps": (torch.int8, elements)}

    def compress(self, flat: torch.Tensor, dtype: torch.dtype) -> Arrays:
        return quantise(flat, self.block)

    @property
    def width(self) -> int:
        return self.block

    def compress_rows(
        self, rows: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> tuple[list[Arrays], torch.Tensor]:
        scales, steps = quantise_rows(rows)
        given = scaled_rows(scales, steps).to(dtype)
        return _each(scales=scales.split(grid.rows), steps=grid.parts(steps)), given

    def about(self) -> dict[str, Any]:
        return {"kind": "int8", "block": self.block, "feedback": self.error_feedback}


@dataclass(frozen=True)
class Sparse(Lossy):
    """The codec for gradients that ``comm_hook`` made sparse: it records every element that is not +0.0.

    Staging buffers have room for what ``world_size`` ranks keep of ``kept``, or for dense gradients where that is less.
    A gradient that was made dense since is recorded dense, if it fits. A step that does not fit is followed by a
    snapshot.
    """

    kept: TopK
    world_size: int

    @property
    def error_feedback(self) -> bool:
        return self.kept.error_feedback

    def consume(
        self, trained: Trained, residuals: dict[torch.Tensor, torch.Tensor], skipped: bool
    ) -> dict[str, Arrays]:
        grads = {name: local_of(p.grad.detach()).reshape(-1) for name, p in trained if p.grad is not None}
        return {name: self.compress(grad, grad.dtype) for name, grad in grads.items()}

    def compress(self, flat: torch.Tensor, dtype: torch.dtype) -> Arrays:
        return pick(flat, flat.view(BITS[flat.element_size()]) != 0, self.kept.block)

    def sizes(self, elements: int, dtype: torch.dtype) -> Sizes:
        sizes = self.kept.sizes(elements, dtype)
        kept = sizes["values"][1] * self.world_size
        if kept * (2 + dtype.itemsize) < elements * dtype.itemsize:
            return {**sizes, "indices": (torch.uint16, kept), "values": (dtype, kept)}
        return {**sizes, "indices": (torch.uint16, 0), "values": (dtype, elements)}

    def about(self) -> dict[str, Any]:
        return self.kept.about()


def _largest_of(rows: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the indices of the ``kept`` largest elements in each of ``rows``."""
    at_once = len(rows)
    if rows.device.type == "cpu":
        at_once = max(1, RANKED_AT_ONCE * torch.get_num_threads() // rows.shape[1])
    found = [part.abs().topk(kept, dim=1, sorted=False).indices for part in rows.split(at_once)]
    return torch.cat(found) if len(found) > 1 else found[0]


def _each(**arrays: Sequence[torch.Tensor]) -> list[Arrays]:
    """Return the arrays of each tensor as one dictionary, from arrays by name for all tensors."""
    return [dict(zip(arrays, of_one, strict=True)) for of_one in zip(*arrays.values(), strict=True)]


def _by_name(trained: Trained, arrays: Sequence[Arrays]) -> dict[str, Arrays]:
    return {name: of_one for (name, _), of_one in zip(trained, arrays, strict=True)}


def _keyed(arrays: Arrays) -> Arrays:
    return {array_key(name, array.dtype): array for name, array in arrays.items()}


def _layout_of(sizes: Sizes) -> Layout:
    entries = [(key, TO_NAME[dtype], (count,)) for key, (dtype, count) in sorted(sizes.items()) if count]
    return Layout.build(entries, METADATA)
