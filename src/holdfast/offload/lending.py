"""Lending: host memory for what comes from a separate device, which goes back by itself.

What flows between blocks has no one who knows when it is done with: a copy from host memory is under way while the
computation that wants it has long been asked for. So tensors are lent, and their memory is the lender's again when
nobody, and no copy, holds them any more.

Block inputs that stay in host memory, and the delayed gradients that lie where inputs were, share one *arena* of the
size that the schedule has counted for both: inputs come from its bottom in the order of the blocks, gradients from its
top, where the inputs of the last blocks are the first to go. Bytes, in multiples of ``ALIGN``.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..io.buffers import Buffer, BufferPool, classed
from ..units import round_up
from .units import ALIGN

CROSSING = (
    "parameters",
    "resident parameters",
    "displaced parameters",
    "gradients",
    "resident gradients",
    "inputs",
    "kept inputs",
    "input gradients",
)
"""The kinds of buffers that a separate device copies from or to."""

Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""What a packed tensor is: dtype, shape and strides. Kernels, and so the last bits, depend on strides."""


class Lending:
    """Lends memory of ``pool``, of which ``kept_bytes`` for what is kept.

    Micro-batches of other lengths take other sizes. What is pinned comes in few sizes all the same (``classed``), since
    pinning is slow and a size is kept for the next of its kind; up to ``planned_bytes``, the largest that the plan has
    counted, none takes more than that.
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
        """What was let go of, by whichever thread and in the middle of whatever."""
        self._lock = threading.Lock()

    def lend(self, nbytes: int, kind: str, from_top: bool = False) -> tuple[torch.Tensor, memoryview]:
        """``nbytes`` as a flat tensor of uint8, and the same bytes for I/O, which do not hold it. Kept inputs lie in
        the arena, as long as there is room."""
        with self._lock:
            while self._returned:
                self._returned.popleft()()
            view, give = self._find(nbytes, kind, from_top)
        flat = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(flat.untyped_storage(), self._returned.append, give)
        return flat, view

    def _find(self, nbytes: int, kind: str, from_top: bool) -> tuple[memoryview, Callable[[], None]]:
        """Memory, and what gives it back."""
        length = max(nbytes, 1)  # no tensor shares nothing
        if self._arena is not None and self._buffer is not None and kind == "kept inputs":
            offset = self._arena.take(length, from_top)
            if offset is not None:
                return self._buffer.view[offset : offset + length], partial(self._arena.give, offset)
        buffer = self._pool.take(self._size(length), kind)
        return buffer.view[:length], partial(self._pool.give, buffer)

    def _size(self, nbytes: int) -> int:
        """How much is taken for ``nbytes``."""
        if not self._in_classes:
            return nbytes
        size = classed(nbytes)
        return self._planned_bytes if nbytes <= self._planned_bytes < size else size

    def lender(
        self, kind: str, from_top: bool = False
    ) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Lends memory for copies of some tensors."""

        def lend(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            forms = forms_of(tensors)
            return unpacked(self.lend(packed_bytes(forms, 1), kind, from_top)[0], forms)

        return lend

    def close(self) -> None:
        """Nothing is lent any more."""
        self._returned.clear()
        self._arena = self._buffer = None


class Arena:
    """Which parts of ``nbytes`` are taken. Used by one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self._gaps = [(0, nbytes)]
        """Start and end of what is free, in order."""
        self._taken: dict[int, int] = {}
        """Bytes of each part that is taken, by its start."""

    def take(self, nbytes: int, from_top: bool = False) -> int | None:
        """Where ``nbytes`` begin, as low or as high as there is room; None if there is none."""
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
        """The part that begins at ``offset`` is free."""
        start, end = offset, offset + self._taken.pop(offset)
        index = bisect(self._gaps, (start, end))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == start:
            start = self._gaps.pop(index - 1)[0]
            index -= 1
        self._gaps.insert(index, (start, end))


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    return [(tensor.dtype, tensor.shape, _dense_strides(tensor)) for tensor in tensors]


def packed_bytes(forms: list[Form], multiple: int | None = None) -> int:
    """Bytes of tensors one after another: whole pages, unless another ``multiple`` is given."""
    nbytes = sum(round_up(shape.numel() * dtype.itemsize, ALIGN) for dtype, shape, _ in forms)
    return round_up(nbytes) if multiple is None else round_up(nbytes, multiple)


def unpacked(flat: torch.Tensor, forms: list[Form]) -> list[torch.Tensor]:
    """Packed tensors, as views of the bytes that they are packed in."""
    offset, tensors = 0, []
    for dtype, shape, strides in forms:
        end = offset + shape.numel() * dtype.itemsize
        tensors.append(flat[offset:end].view(dtype).as_strided(shape, strides))
        offset = round_up(end, ALIGN)
    return tensors


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``tensor``, or, where it has gaps or overlaps, those of a clone of it."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
