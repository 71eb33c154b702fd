"""Folders of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and ``*.distcp`` files, read in place.

An entry of a file is an archive of ``torch.save`` with one tensor. Folders may have a million of them, so an entry is
opened when it is first read; what ``.metadata`` claims of it is checked against the sizes of the files before, and
against the archive then. The CRC-32 of an entry is checked before a byte of it is used.
"""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import Damaged
from ...state.atoms import Atom
from ...state.pieces import Pieces, dense, row_major
from ...units import KiB
from ..archives import Archive
from ..keys import name_all, progress_of
from ..pickles import Record, Tensor
from ..small import is_small, tensor_json, value_of
from ..source import Files, Part, Stored, check_sum
from .dcp_metadata import METADATA, Claims, Entry, Shards

REMEMBERED = 64 * KiB
"""Bytes at most of an entry without tensors whose content is kept, as the same comes again and again."""
MOST_EXPANDED = 1 << 20
"""Elements at most of a tensor that has more of them than are stored."""


def is_dcp(path: Path) -> bool:
    """Whether ``path`` is such a folder, whole or not."""
    return (path / METADATA).is_file() or any(path.glob("__*_*.distcp"))


class DCP(Files):
    """The folder ``path``. ``progress["roots"]`` says which keys were taken for the model's and the optimizer's."""

    def __init__(self, path: Path) -> None:
        """Raises ``Damaged`` if ``.metadata`` claims what the files do not have, or does not cover a tensor once."""
        super().__init__(str(path), "dcp")
        claims = Claims(path)
        self._entries: list[tuple[str, Entry, tuple[int, ...]]] = []
        self._checked: set[int] = set()
        self._tensors: dict[int, tuple[Archive, Tensor]] = {}
        self._reordered: tuple[int, bytes] = (-1, b"")
        self._locks = [threading.RLock() for _ in range(16)]
        named = name_all({key: shards.kind for key, shards in claims.tensors.items()}, claims.paths)
        values = _Values()
        rest = {key: values.read(key, entry) for key, entry in claims.values.items()}
        for key, shards in claims.tensors.items():
            name, slot = named.tensors[key]
            stored = self._stored(key, Atom(name, slot, *shards.kind), shards)
            if is_small(stored):
                self._check(stored.atom.key, stored.atom, stored.pieces)
                rest[key] = value_of(self, stored)
            else:
                self.add(stored)
        self.progress = progress_of(
            {key: rest[key] for key in claims.paths if key in rest}, claims.paths, named
        )

    def read(self, part: int, offset: int, into: memoryview) -> None:
        with self._naming(part), self._locks[part % 16]:
            where = self._open(part)
            if part not in self._checked and len(into) != where.nbytes:
                super().check(part)
                self._checked.add(part)
        with self._naming(part):
            if part in self._tensors:
                into[:] = memoryview(self._in_order(part))[offset : offset + len(into)]
            else:
                super().read(part, offset, into)

    def check(self, part: int) -> None:
        with self._naming(part), self._locks[part % 16]:
            self._open(part)
            if part in self._tensors:
                self._in_order(part)
            super().check(part)
            self._checked.add(part)

    def _stored(self, key: str, atom: Atom, shards: Shards) -> Stored:
        pieces = []
        for chunk in shards.chunks:
            if chunk.entry is not None:
                self._entries.append((key, chunk.entry, chunk.box.shape))
                nbytes = chunk.box.elements * atom.itemsize
                part = Part(str(chunk.entry.path), chunk.entry.offset, nbytes, atom.dtype)
                pieces.append(dense(chunk.box, self.add_part(part)))
        return Stored(atom, Pieces.of(pieces, len(atom.shape)))

    @contextmanager
    def _naming(self, part: int) -> Iterator[None]:
        """What goes wrong inside says of which tensor."""
        key, entry, _ = self._entries[part]
        try:
            yield
        except Damaged as error:
            where = error.path, error.offset, error.nbytes
            raise type(error)(
                f"{key}, in {entry.path} from {entry.offset} on: {error}",
                path=where[0], offset=where[1], nbytes=where[2], atoms=(key,),
            ) from error  # fmt: skip

    def _open(self, part: int) -> Part:
        """The part as its archive has it, which has to be what was claimed."""
        where = self.parts[part]
        if where.crc32 is not None or part in self._tensors:
            return where
        _, entry, shape = self._entries[part]
        archive = Archive(entry.path, entry.offset, entry.nbytes)
        tensor = archive.content
        if not isinstance(tensor, Tensor):
            raise Damaged(f"there is a {type(tensor).__name__} and no tensor", path=where.path)
        if tensor.shape != shape or tensor.storage.dtype != where.dtype:
            raise Damaged(
                f"there is a tensor {list(tensor.shape)} of {tensor.storage.dtype}, not {list(shape)} of"
                f" {where.dtype}: the file is of another save",
                path=where.path,
            )
        held = archive.part(tensor.storage)
        if held.nbytes == where.nbytes and tensor.offset == 0 and _in_c_order(tensor):
            self.parts[part] = held
        else:
            self._tensors[part] = archive, tensor
        return self.parts[part]

    def _in_order(self, part: int) -> bytes:
        """All of a part in C order, which is stored otherwise. The last one is remembered."""
        with self._locks[part % 16]:
            number, data = self._reordered
            if number != part:
                data = _bytes_of(*self._tensors[part])
                self._reordered = part, data
            return data


class _Values:
    """Entries that are no tensors, as JSON."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def read(self, key: str, entry: Entry) -> Any:
        """Raises ``Damaged``, naming ``key``."""
        with open(entry.path, "rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.nbytes) if entry.nbytes <= REMEMBERED else b""
        if data and data in self._known:
            return self._known[data]
        try:
            archive = Archive(entry.path, entry.offset, entry.nbytes)
            value = _json(archive, archive.content)
        except (Damaged, RecursionError) as error:
            raise Damaged(
                f"{key}, in {entry.path} from {entry.offset} on: {error}", path=str(entry.path), atoms=(key,)
            ) from error
        if data:
            self._known[data] = value
        return value


def _json(archive: Archive, value: Any) -> Any:
    """``value``, read from a pickle, as ``state.progress.encode`` has it; an object as what it was given."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return tensor_json(value.storage.dtype, value.shape, _bytes_of(archive, value))
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"__tuple__": [_json(archive, item) for item in value]}
    if isinstance(value, list):
        return [_json(archive, item) for item in value]
    if isinstance(value, dict):
        plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
        items = [[_json(archive, key), _json(archive, item)] for key, item in value.items()]
        return dict(items) if plain else {"__dict__": items}
    if isinstance(value, Record) and value.name == "_codecs.encode":  # how bytes are pickled
        return {"__bytes__": base64.b64encode(str(value.args[0]).encode("latin1")).decode()}
    if isinstance(value, Record):
        given = {"args": list(value.args), "fields": value.fields, "items": value.items}
        return {"__object__": value.name} | {
            name: _json(archive, part) for name, part in given.items() if part
        }
    return {"__object__": type(value).__name__, "args": [str(value)]}


def _bytes_of(archive: Archive, tensor: Tensor) -> bytes:
    """The elements of ``tensor`` in C order, once its storage is known to be whole."""
    part, elements = archive.part(tensor.storage), prod(tensor.shape)
    spans = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum(max(0, n - 1) * stride for n, stride in spans)
    outside = (
        last >= part.nbytes // part.itemsize or min(*tensor.shape, *tensor.strides, tensor.offset, 0) < 0
    )
    if elements and (outside or elements > max(part.nbytes, MOST_EXPANDED)):
        raise Damaged(f"a tensor {list(tensor.shape)} lies outside of what is stored", path=part.path)
    with open(part.path, "rb") as file:
        file.seek(part.offset)
        data = file.read(part.nbytes)
    check_sum(part, zlib.crc32(data))
    elements = np.frombuffer(data, dtype=f"V{part.itemsize}", count=part.nbytes // part.itemsize)[
        tensor.offset :
    ]
    strides = tuple(stride * part.itemsize for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(elements, tensor.shape, strides).tobytes()


def _in_c_order(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.strides, row_major(tensor.shape), strict=True)
    return all(n == 1 or stride == dense for n, stride, dense in pairs)
