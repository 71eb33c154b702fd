"""Host memory for copies to and from a separate device, which returns to its pool by itself.

No code knows when a tensor that flows between blocks is no longer used: a copy from host memory may be under way long
after the computation that needs it was queued. So tensors are lent. Their memory returns when nothing, and no copy,
refers to them any more.

Block inputs that stay in host memory, and the delayed gradients that reuse the space of inputs, share one *arena* of
the size that the schedule has counted for both. Inputs are placed from the bottom in the order of the blocks. Gradients
are placed from the top, where the inputs of the last blocks are released first. Sizes are bytes, in multiples of
``ALIGN``.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...io.buffers import Buffer, BufferPool, classed
from ...quantities import round_up
from .block_states import ALIGN

PINNED_KINDS = (
    "parameters",
    "resident parameters",
    "displaced parameters",
    "gradients",
    "resident gradients",
    "inputs",
    "kept inputs",
    "input gradients",
    "experts",
)
"""Kinds of buffers that a separate device copies from or to."""
PackedForm = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""Dtype, shape and strides of a packed tensor. Kernels, and so the last bits, depend on strides."""


class TransferPool:
    """Lends memory of ``pool``, of which ``kept_bytes`` are an arena for inputs that stay.

    Micro-batches of other lengths need other sizes. Pinning is slow, and a pinned size is kept for the next buffer of
    its kind, so pinned buffers come in few sizes (``classed``). Up to ``planned_bytes``, the largest size that the plan
    has counted, no buffer takes more than that.
    """

    def __init__(
        self, pool: BufferPool, kept_bytes: int, in_classes: bool = False, planned_bytes: int = 0
    ) -> None:
        self._pool = pool
        self._in_classes, self._planned_bytes = in_classes, planned_bytes
        self._arena: Arena | None = None
        self._buffer: Buffer | None = None
        if kept_bytes:
            self._buffer = pool.take(kept_bytes, "kept inputs")
            self._arena = Arena(self._buffer.nbytes)
        self._returned: deque[Callable[[], None]] = deque()
        """Functions that return released memory to the pool; any thread may append one at any moment."""
        self._lock = threading.Lock()

    def lend(self, nbytes: int, kind: str, from_top: bool = False) -> tuple[torch.Tensor, memoryview]:
        """Return ``nbytes`` as a flat uint8 tensor, and the same bytes for I/O, which do not keep the tensor alive.

        Inputs that stay are placed in the arena while there is room.
        """
        with self._lock:
            while self._returned:
                self._returned.popleft()()
            view, give = self._find(nbytes, kind, from_top)
        flat = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(flat.untyped_storage(), self._returned.append, give)
        return flat, view

    def _find(self, nbytes: int, kind: str, from_top: bool) -> tuple[memoryview, Callable[[], None]]:
        """Return memory, and the function that gives it back."""
        length = max(nbytes, 1)  # tensors of no bytes need memory of their own too
        if self._arena is not None and self._buffer is not None and kind == "kept inputs":
            offset = self._arena.take(length, from_top)
            if offset is not None:
                return self._buffer.view[offset : offset + length], partial(self._arena.give, offset)
        buffer = self._pool.take(self._size(length), kind)
        return buffer.view[:length], partial(self._pool.give, buffer)

    def _size(self, nbytes: int) -> int:
        """Return the size of the buffer taken for ``nbytes``."""
        if not self._in_classes:
            return nbytes
        size = classed(nbytes)
        return self._planned_bytes if nbytes <= self._planned_bytes < size else size

    def lender(
        self, kind: str, from_top: bool = False
    ) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Return a function that lends memory for copies of some tensors."""

        def lend(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            forms = forms_of(tensors)
            return unpacked(self.lend(packed_bytes(forms, 1), kind, from_top)[0], forms)

        return lend

    def close(self) -> None:
        """Lend nothing any more."""
        self._returned.clear()
        self._arena = self._buffer = None


class Arena:
    """Allocator of parts of ``nbytes``. Used by one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self._gaps = [(0, nbytes)]
        """Start and end of each free part, in order."""
        self._taken: dict[int, int] = {}
        """Bytes of each allocated part, by its start."""

    def take(self, nbytes: int, from_top: bool = False) -> int | None:
        """Allocate ``nbytes`` and return their offset, as low or as high as possible; None if there is no room."""
        size = round_up(max(nbytes, 1), ALIGN)
        fitting = [index for index, (start, end) in enumerate(self._gaps) if end - start >= size]
        if not fitting:
            return None
        index = fitting[-1 if from_top else 0]
        start, end = self._gaps[index]
        offset = end - size if from_top else start
        rest = [(start, offset), (offset + size, end)]
        self._gaps[index : index + 1] = [(start, end) for start, end in rest if end > start]
        self._taken[offset] = size
        return offset

    def give(self, offset: int) -> None:
        """Free the part that begins at ``offset``."""
        start, end = offset, offset + self._taken.pop(offset)
        index = bisect(self._gaps, (start, end))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == start:
            start = self._gaps.pop(index - 1)[0]
            index -= 1
        self._gaps.insert(index, (start, end))


def forms_of(tensors: Sequence[torch.Tensor]) -> list[PackedForm]:
    return [(tensor.dtype, tensor.shape, _dense_strides(tensor)) for tensor in tensors]


def packed_bytes(forms: list[PackedForm], multiple: int | None = None) -> int:
    """Return the bytes of tensors packed one after another, rounded up to pages, or to ``multiple`` if given."""
    nbytes = sum(round_up(shape.numel() * dtype.itemsize, ALIGN) for dtype, shape, _ in forms)
    return round_up(nbytes) if multiple is None else round_up(nbytes, multiple)


def unpacked(flat: torch.Tensor, forms: list[PackedForm]) -> list[torch.Tensor]:
    """Return the packed tensors as views of ``flat``."""
    offset, tensors = 0, []
    for dtype, shape, strides in forms:
        end = offset + shape.numel() * dtype.itemsize
        tensors.append(flat[offset:end].view(dtype).as_strided(shape, strides))
        offset = round_up(end, ALIGN)
    return tensors


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor``; if it has gaps or overlaps, those of a clone of it."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
