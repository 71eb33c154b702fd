"""The bytes of a payload file, made of its tensors all at once or a block at a time.

A block at a time needs little memory beside the tensors. Both ways give the same bytes. Called by the writers of
snapshots and by saves of other libraries' states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash

from ...io.buffers import Buffer
from ...state.plain_tensors import TO_NAME, flat_bytes
from ...store.format.payload_layout import METADATA, Layout, block_spans


class SnapshotImage:
    """The bytes of a file of ``layout`` that holds ``tensors``, a block at a time."""

    def __init__(self, layout: Layout, tensors: dict[str, torch.Tensor]) -> None:
        self._layout, self._tensors = layout, tensors
        self._flat: tuple[str, torch.Tensor] = ("", torch.empty(0, device="cpu"))

    def fill(self, view: memoryview, start: int) -> None:
        """Copy the bytes from offset ``start`` on into ``view``."""
        stop = start + len(view)
        piece = torch.frombuffer(view, dtype=torch.uint8)
        piece.zero_()
        head = self._layout.header[start:stop]
        view[: len(head)] = head
        for key in self._layout.keys_between(start, stop):
            entry = self._layout[key]
            a, b = max(entry.offset, start), min(entry.end, stop)
            flat = self._bytes_of(key)
            piece[a - start : b - start].copy_(flat[a - entry.offset : b - entry.offset])

    def first_difference(
        self, checksums: Sequence[str], blocks: range, beat: Callable[[], None] = lambda: None
    ) -> tuple[str, ...] | None:
        """Return the tensors in the first block that is not as a file with these ``checksums`` has it.

        Returns None if none of ``blocks`` differs. Copies nothing that is on the host and in C order; of what is on a
        device, at most one block at a time. Calls ``beat`` after each block.
        """
        spans = list(block_spans(self._layout.file_bytes))
        for block in blocks:
            if self._digest(*spans[block]) != checksums[block]:
                return tuple(self._layout.keys_between(*spans[block]))
            beat()
        return None

    def _digest(self, start: int, stop: int) -> str:
        """Return the xxh3_64 of the bytes from ``start`` to ``stop``."""
        digest, at = xxhash.xxh3_64(self._layout.header[start:stop]), max(start, len(self._layout.header))
        for key in self._layout.keys_between(start, stop):
            entry = self._layout[key]
            a, b = max(entry.offset, start), min(entry.end, stop)
            digest.update(bytes(a - at))
            digest.update(self._bytes_of(key)[a - entry.offset : b - entry.offset].cpu().numpy().data)
            at = b
        digest.update(bytes(max(stop - at, 0)))
        return digest.hexdigest()

    def _bytes_of(self, key: str) -> torch.Tensor:
        """Return all bytes of a tensor in C order. A tensor with another memory order is copied, and the copy kept
        while in use.
        """
        if self._flat[0] != key:
            self._flat = (key, flat_bytes(self._tensors[key]))
        return self._flat[1]


def write_tensor(image: memoryview, layout: Layout, key: str, tensor: torch.Tensor) -> None:
    """Copy ``tensor`` to its place of ``layout`` in ``image``, the whole file."""
    place_in(image, layout, key, tensor).copy_(tensor)


def place_in(image: memoryview, layout: Layout, key: str, like: torch.Tensor) -> torch.Tensor:
    """Return the place of the tensor ``key`` in ``image``, the whole file, as a tensor of the form of ``like``."""
    entry = layout[key]
    if not entry.nbytes:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(image[entry.offset : entry.end], dtype=like.dtype).view(like.shape)


def image_of(tensors: dict[str, torch.Tensor]) -> memoryview:
    """Return the bytes of a file with copies of ``tensors``, in new memory."""
    layout = Layout.build([(key, TO_NAME[t.dtype], tuple(t.shape)) for key, t in tensors.items()], METADATA)
    view = Buffer(layout.file_bytes, "records").view
    view[: len(layout.header)] = layout.header
    for key, tensor in tensors.items():
        write_tensor(view, layout, key, tensor.detach())
    return view
