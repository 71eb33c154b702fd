"""The layout of a payload file: the position of each tensor in it.

Payload files are safetensors. Offsets and sizes are bytes from the start of the file. The header is padded with spaces
to whole pages, and filler tensors ``__pad__N`` keep the rest aligned. A tensor of 16 KiB or more starts at a multiple
of 16 KiB, so every 4 MiB boundary of the file (a checksum block's edge) is a multiple of 4096 fp32 elements from that
tensor's start, where the host optimizer may split it. Smaller tensors start at multiples of 64.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from holdfast.errors import Damaged
from holdfast.quantities import PAGE, KiB, MiB, round_up
from holdfast.state.split_masters import key_of_whole
from holdfast.state.tensor_entries import DTYPE_BYTES

CHECKSUM_BLOCK = 4 * MiB
"""Bytes under one checksum, counted from the start of the file; the last block of a file is shorter."""
LARGE, LARGE_ALIGNMENT, SMALL_ALIGNMENT = 16 * KiB, 16 * KiB, 64
PAD = "__pad__"
METADATA = {"format": "holdfast", "version": "1"}
"""The metadata in the header of a payload file; an engine's files have none."""
MOST = 1 << 62
"""A number above any size of a tensor."""


@dataclass(frozen=True)
class TensorInFile:
    """A tensor in a file. ``offset`` is absolute, ``dtype`` is the safetensors name."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Layout:
    """The header of a payload file and its meaning. ``entries`` and ``pads`` are in file order."""

    entries: tuple[TensorInFile, ...]
    pads: tuple[TensorInFile, ...]
    header: bytes
    file_bytes: int

    @cached_property
    def _by_key(self) -> dict[str, TensorInFile]:
        return {entry.key: entry for entry in self.entries}

    def __getitem__(self, key: str) -> TensorInFile:
        return self._by_key[key]

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def keys_between(self, start: int, stop: int) -> list[str]:
        """Return the tensors with a byte in ``[start, stop)``; for a part of a split master, the master."""
        found = [entry.key for entry in self.entries if entry.offset < stop and entry.end > start]
        return [*dict.fromkeys(map(key_of_whole, found))]

    @classmethod
    def build(
        cls,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        metadata: dict[str, str] | None = None,
        alignment: int = SMALL_ALIGNMENT,
        own: Mapping[str, int] | None = None,
    ) -> Layout:
        """Return the layout of ``tensors`` (key, dtype, shape) in this order.

        Depends on nothing else. Small tensors start at multiples of ``alignment``. Those in ``own``, whatever their
        size, start at multiples of the number there.

        >>> layout = Layout.build([("w", "F32", (3,))])
        >>> layout["w"].offset, layout.file_bytes
        (4096, 8192)
        """
        _check(tensors)
        header_bytes = PAGE
        while True:  # the offsets are in the header, and the length of the header moves the tensors
            placed = _place(tensors, header_bytes, alignment, own or {})
            header = _encode(placed, header_bytes, metadata)
            if len(header) == header_bytes:
                return cls._of(placed, header)
            header_bytes = len(header)

    @classmethod
    def parse(cls, header: bytes | bytearray | memoryview) -> Layout:
        """Return the layout that ``header``, the first bytes of a payload file, describes.

        In a file of another writer, a tensor with the name of a filler is an ordinary tensor. Raises ``Damaged`` for
        any other content.
        """
        try:
            length = 8 + struct.unpack_from("<Q", header)[0]
            if length > len(header):
                raise ValueError(f"the header has {length} bytes, {len(header)} were given")
            table = json.loads(bytes(header[8:length]))
            table.pop("__metadata__", None)
            placed = [
                TensorInFile(key, item["dtype"], tuple(item["shape"]), length + item["data_offsets"][0],
                      item["data_offsets"][1] - item["data_offsets"][0])
                for key, item in table.items()
            ]  # fmt: skip
            placed.sort(key=attrgetter("offset", "nbytes"))
            _check_placed(placed, length)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            RecursionError,
            struct.error,
        ) as error:
            raise Damaged(
                f"not the header of a payload file: {error}. Check the run with `holdfast verify`."
            ) from error
        return cls._of(placed, bytes(header[:length]))

    @classmethod
    def _of(cls, placed: list[TensorInFile], header: bytes) -> Layout:
        entries = without_pads(placed, len(header))
        left = {entry.key for entry in entries}
        pads = tuple(entry for entry in placed if entry.key not in left)
        return cls(tuple(entries), pads, header, placed[-1].end if placed else len(header))


def without_pads(placed: list[TensorInFile], header_bytes: int) -> list[TensorInFile]:
    """Return the tensors of a file that are not fillers, in file order.

    In a file of another writer, a tensor with the name of a filler is an ordinary tensor.
    """
    pads = [entry for entry in placed if entry.key.startswith(PAD)]
    named = all(pad.key == f"{PAD}{number}" and pad.dtype == "U8" for number, pad in enumerate(pads))
    if not named or header_bytes % PAGE:  # only our files have both
        return placed
    return [entry for entry in placed if not entry.key.startswith(PAD)]


def block_spans(file_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of each checksum block of a file."""
    for start in range(0, file_bytes, CHECKSUM_BLOCK):
        yield start, min(start + CHECKSUM_BLOCK, file_bytes)


def _check(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    seen = set()
    for key, dtype, shape in tensors:
        if key in seen or key.startswith(PAD) or key == "__metadata__":
            raise ValueError(f"tensor key {key!r} is " + ("there twice" if key in seen else "reserved"))
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{key!r} has dtype {dtype!r}; a payload file holds {', '.join(DTYPE_BYTES)}")
        if min(shape, default=0) < 0:
            raise ValueError(f"{key!r} has the shape {shape}")
        seen.add(key)


def _place(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    header_bytes: int,
    alignment: int,
    own: Mapping[str, int],
) -> list[TensorInFile]:
    """Return entries in file order, filler included, that cover all bytes from the header to a whole page."""
    placed: list[TensorInFile] = []
    position = header_bytes
    num_pads = 0

    def fill(target: int) -> None:
        nonlocal position, num_pads
        if target > position:
            placed.append(
                TensorInFile(f"{PAD}{num_pads}", "U8", (target - position,), position, target - position)
            )
            position, num_pads = target, num_pads + 1

    for key, dtype, shape in tensors:
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        fill(round_up(position, own.get(key) or (LARGE_ALIGNMENT if nbytes >= LARGE else alignment)))
        placed.append(TensorInFile(key, dtype, tuple(shape), position, nbytes))
        position += nbytes
    fill(round_up(position, PAGE))
    return placed


def _encode(placed: list[TensorInFile], header_bytes: int, metadata: dict[str, str] | None) -> bytes:
    """Return the header for ``placed``: at least ``header_bytes``, more if the table needs it."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for entry in placed:
        start = entry.offset - header_bytes
        offsets = [start, start + entry.nbytes]
        table[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    length = max(header_bytes, round_up(8 + len(text)))
    return struct.pack("<Q", length - 8) + text.ljust(length - 8, b" ")


def _check_placed(placed: list[TensorInFile], header_bytes: int) -> None:
    position = header_bytes
    for entry in placed:
        for size in entry.shape:
            if type(size) is not int or not 0 <= size < MOST:
                raise ValueError(f"tensor {entry.key!r} has the shape {entry.shape}")
        if entry.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor {entry.key!r} is of the type {entry.dtype!r}, and supported are {', '.join(DTYPE_BYTES)}"
            )
        if type(entry.offset) is not int or type(entry.nbytes) is not int:
            raise ValueError(f"tensor {entry.key!r} lies at {entry.offset}, {entry.nbytes} bytes")
        if entry.offset != position or entry.nbytes != math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]:
            raise ValueError(f"tensor {entry.key!r} at {entry.offset} does not follow the one before it")
        position += entry.nbytes
