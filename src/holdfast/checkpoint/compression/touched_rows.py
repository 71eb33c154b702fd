"""The form of a record's part that leaves out the rows of zeros in its gradients.

A batch touches few rows of an embedding, and may give some experts no token. Their dense gradients are zeros, which
need not be written. A row is the content of one index of the first dimension; a tensor with fewer than two dimensions
is one row. Only rows whose bytes are all zero are left out, so replay gets the bits that training had: -0.0 and NaN are
stored. A parameter without gradient takes nothing.

The form is chosen for each part and step, where it saves enough. Dense gradients are recognised by a few words of each
parameter, and are not touched. Otherwise rows move towards the beginning of the part, so no other memory is needed.
Called by the recorder's thread and by replay. Sizes are bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from ...errors import Damaged
from ...quantities import MiB, round_up
from ...state.plain_tensors import TO_NAME
from ...store.format.payload_layout import METADATA, Layout

KIND = "rows"
VALUES, TOUCHED = "values/U8", "touched/U8"
"""The keys of a part: the stored rows, and a bit for each row that tells whether it is stored."""
ALIGNMENT = 64
"""The rows of each parameter start at multiples of this in ``VALUES``, so that a gradient can be used where it lies."""
SAMPLES = 64
"""The words of a parameter that are looked at. If none of them is zero, neither is any row taken to be."""
LEAST_BYTES = 4096
"""Smaller parameters are not looked at, and stored whole."""
LEAST_SAVED = 32
"""Rows are left out of a parameter, and the form is chosen for a part, if that saves at least a 32nd of its bytes."""
HEAD_BYTES = 64
"""The bytes at the beginning of every row that are read before all of a parameter is."""
PIECE = MiB
"""The most bytes that are moved at once. They stay in the processor's caches."""


class _Place(NamedTuple):
    """The place of a parameter in a dense part."""

    name: str
    told: str
    offset: int
    rows: int
    row_bytes: int


def rows_of(shape: Sequence[int]) -> int:
    """Return the number of rows of a tensor."""
    return shape[0] if len(shape) > 1 else 1


def order_of(name: str, shape: Sequence[int]) -> tuple[int, str]:
    """Return the sorting key of a parameter in a part: few rows first, so that less has to be moved."""
    return rows_of(shape), name


def digest_of(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return the xxh3_64 of names, dtypes and shapes of ``parameters``, in the order of a part."""
    names = sorted(parameters, key=lambda name: order_of(name, parameters[name].shape))
    return _digest(_told(name, TO_NAME[parameters[name].dtype], parameters[name].shape) for name in names)


def _digest(told: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(told).encode())


def _told(name: str, dtype: str, shape: Sequence[int]) -> str:
    return json.dumps([name, dtype, *shape])


def leave_out_rows(part: memoryview, without: Collection[str]) -> tuple[memoryview, dict[str, Any]] | None:
    """Rewrite ``part`` in its own memory without its rows of zeros.

    Args:
        part: A dense part, whose parameters are in the order of ``order_of``.
        without: The names of parameters that have no gradient.

    Returns the beginning of ``part`` that is to be written, in whole pages, and the codec as JSON; None, with ``part``
    as it was, if that would save too little.
    """
    [header_bytes] = struct.unpack_from("<Q", part)
    places, examined, words = _places_of(bytes(part[: 8 + header_bytes]))
    memory, absent = np.frombuffer(part, np.uint8), set(without)
    held = [place for place in places if place.name not in absent]
    suspects = compress(examined, (memory.view(np.uint64)[words] == 0).any(1))
    found = {p.name: _touched(memory, p) for p in suspects if p.name not in absent}
    touched = {name: mask for name, mask in found.items() if mask is not None}
    if not touched and len(held) == len(places):
        return None
    counts = [int(np.count_nonzero(touched[p.name])) if p.name in touched else p.rows for p in held]
    layout = Layout.build(
        [
            (VALUES, "U8", (sum(_room(count, p) for count, p in zip(counts, held, strict=True)),)),
            (TOUCHED, "U8", (sum(_bit_bytes(p.rows) for p in held),)),
        ],
        METADATA,
        own={VALUES: ALIGNMENT, TOUCHED: ALIGNMENT},
    )
    if layout.file_bytes > len(part) - len(part) // LEAST_SAVED:
        return None
    end = layout[VALUES].offset
    for place in held:
        stop = _move(memory, place, touched.get(place.name), end)
        end = round_up(stop, ALIGNMENT)
        memory[stop:end] = 0
    bits = [np.packbits(touched.get(p.name, np.ones(p.rows, bool)), bitorder="little") for p in held]
    last = layout[TOUCHED]
    memory[last.offset : last.end] = np.concatenate([np.empty(0, np.uint8), *bits])
    memory[last.end : layout.file_bytes] = 0
    part[: len(layout.header)] = layout.header
    return part[: layout.file_bytes], {"kind": KIND, "parameters": _digest(p.told for p in held)}


@lru_cache(maxsize=64)
def _places_of(header: bytes) -> tuple[list[_Place], list[_Place], np.ndarray]:
    """Return the parameters of a dense part, those to be looked at, and the words of each of these to look at."""
    places = []
    for entry in Layout.parse(header).entries:
        name, rows = entry.key.removesuffix("/grad"), rows_of(entry.shape)
        told = _told(name, entry.dtype, entry.shape)
        places.append(_Place(name, told, entry.offset, rows, entry.nbytes // max(rows, 1)))
    assert places == sorted(places, key=lambda place: (place.rows, place.name))
    examined = [place for place in places if place.rows * place.row_bytes >= LEAST_BYTES]
    words = np.array([_words_of(place) for place in examined], np.int64).reshape(-1, SAMPLES)
    return places, examined, words


def _words_of(place: _Place) -> np.ndarray:
    """Return 8-byte words of a parameter, of rows that are evenly spaced, each from another column."""
    number = np.arange(SAMPLES)
    column = number * 2654435761 % max(1, place.row_bytes // 8) * 8
    return (place.offset + number * place.rows // SAMPLES * place.row_bytes + column) // 8


def _touched(memory: np.ndarray, place: _Place) -> np.ndarray | None:
    """Return for each row whether it has a byte that is not zero; None if hardly any row is zeros."""
    rows = _rows_in(memory, place)
    most = place.rows - place.rows // LEAST_SAVED
    for columns in (rows[:, : HEAD_BYTES // rows.itemsize], rows):
        mask = np.bitwise_or.reduce(columns, axis=1) != 0
        if np.count_nonzero(mask) >= max(most, 1):
            return None
    return mask


def _rows_in(memory: np.ndarray, place: _Place) -> np.ndarray:
    """Return the rows of a parameter as integers of as many bytes as its rows are divided by."""
    width = next(width for width in (8, 4, 2, 1) if place.row_bytes % width == 0)
    stop = place.offset + place.rows * place.row_bytes
    return memory[place.offset : stop].view(f"u{width}").reshape(place.rows, -1)


def _room(count: int, place: _Place) -> int:
    return round_up(count * place.row_bytes, ALIGNMENT)


def _bit_bytes(rows: int) -> int:
    return -(-rows // 8)


def _move(memory: np.ndarray, place: _Place, touched: np.ndarray | None, to: int) -> int:
    """Move the rows of a parameter, or those that are ``touched``, to the offset ``to``, which is not behind them.

    Returns the end. Rows that are narrow are gathered in pieces, wide ones are moved one by one.
    """
    if touched is None:
        return _shift(memory, place.offset, place.rows * place.row_bytes, to)
    at_once = PIECE // place.row_bytes
    if not at_once:
        for row in np.flatnonzero(touched).tolist():
            to = _shift(memory, place.offset + row * place.row_bytes, place.row_bytes, to)
        return to
    rows = _rows_in(memory, place)
    for first in range(0, place.rows, at_once):
        kept = rows[first : first + at_once][touched[first : first + at_once]]  # a copy
        memory[to : to + kept.nbytes] = kept.reshape(-1).view(np.uint8)
        to += kept.nbytes
    return to


def _shift(memory: np.ndarray, start: int, nbytes: int, to: int) -> int:
    if to != start:
        for first in range(0, nbytes, PIECE):
            size = min(PIECE, nbytes - first)
            memory[to + first : to + first + size] = memory[start + first : start + first + size]
    return to + nbytes


class RowScratch:
    """A gradient whose memory is reused from record to record. Only the rows of the record before are cleared."""

    def __init__(self, like: torch.Tensor) -> None:
        self.tensor = torch.zeros(like.shape, dtype=like.dtype, device="cpu")
        rows = rows_of(like.shape)
        self._rows = self.tensor.view(rows, like.numel() // max(rows, 1))
        self._written, self._version = torch.empty(0, dtype=torch.int64, device="cpu"), self.tensor._version

    def fill(self, touched: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Set the rows with the numbers ``touched`` to ``values``, which are flat, and all others to zeros."""
        if self.tensor._version == self._version:
            self._rows[self._written] = 0
        else:  # the optimizer changed it; fused kernels unscale unnoticed, and zeros stay zeros
            self.tensor.zero_()
        self._rows[touched] = values.view(len(touched), self._rows.shape[1])
        self._written, self._version = touched, self.tensor._version
        return self.tensor


def put_back_rows(
    part: memoryview, likes: Mapping[str, torch.Tensor], scratches: dict[tuple[Any, ...], Any]
) -> dict[str, torch.Tensor]:
    """Return by name the dense gradients of which ``leave_out_rows`` made ``part``.

    They are in the memory of ``part`` or of ``scratches``, which the next record reuses. ``likes`` holds parameters of
    the same names, dtypes and shapes. Raises ``Damaged`` if the part cannot be of these parameters.
    """
    layout = Layout.parse(part)
    if {entry.key: entry.dtype for entry in layout.entries} != {VALUES: "U8", TOUCHED: "U8"}:
        raise _damaged("has other arrays than rows and their places")
    if layout.file_bytes > len(part):
        raise _damaged(f"ends after {len(part)} of {layout.file_bytes} bytes")
    memory, entries = np.frombuffer(part, np.uint8), (layout[VALUES], layout[TOUCHED])
    values, bits = (memory[entry.offset : entry.end] for entry in entries)
    found: dict[str, torch.Tensor] = {}
    start = first_bit = 0
    for name in sorted(likes, key=lambda name: order_of(name, likes[name].shape)):
        like, rows = likes[name], rows_of(likes[name].shape)
        mask = np.unpackbits(bits[first_bit : first_bit + _bit_bytes(rows)], bitorder="little")
        first_bit += _bit_bytes(rows)
        if len(mask) < rows or mask[rows:].any():
            raise _damaged(f"does not say which of the {rows} rows of {name} it holds")
        touched = torch.from_numpy(np.flatnonzero(mask))
        nbytes = len(touched) * (like.nbytes // max(rows, 1))
        piece = values[start : start + nbytes]
        start = round_up(start + nbytes, ALIGNMENT)
        if len(piece) < nbytes:
            raise _damaged(f"lacks rows of {name}: it holds {len(piece)} of {nbytes} bytes")
        flat = (
            torch.frombuffer(piece, dtype=like.dtype)
            if nbytes
            else torch.empty(0, dtype=like.dtype, device="cpu")
        )
        if len(touched) == rows:
            found[name] = flat.view(like.shape)
        else:
            key = (KIND, name, like.dtype, tuple(like.shape))
            if key not in scratches:
                scratches[key] = RowScratch(like)
            found[name] = scratches[key].fill(touched, flat)
    if start != len(values) or first_bit != len(bits):
        raise _damaged("holds more rows than its parameters have")
    return found


def _damaged(what: str) -> Damaged:
    return Damaged(f"a record {what}. Check the run with `holdfast verify`.")
