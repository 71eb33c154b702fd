"""Folders of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and ``*.distcp`` files, read in place.

An entry of a file is an archive of ``torch.save`` with one tensor. Folders may have a million of them, so an entry is
opened when it is first read; what ``.metadata`` claims of it is checked against the sizes of the files before, and
against the archive then. The CRC-32 of an entry is checked before a byte of it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import Damaged
from ...state.atoms import Atom
from ...state.pieces import Pieces, dense, row_major
from ...units import KiB
from ..archives import Archive
from ..keys import name_all, progress_of
from ..pickles import Tensor
from ..plain import Plain, bytes_of
from ..small import is_small, value_of
from ..source import NUM_LOCKS, Files, Part, Stored
from .dcp_metadata import METADATA, Claims, Entry, Shards

REMEMBERED = 64 * KiB
"""Bytes at most of an entry without tensors whose content is kept, as the same comes again and again."""


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
            {key: rest[key] for key in claims.paths if key in rest}, claims.paths, named, str(path)
        )

    def read(self, part: int, offset: int, into: memoryview) -> None:
        with self._naming(part), self._locks[part % NUM_LOCKS]:
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
        with self._naming(part), self._locks[part % NUM_LOCKS]:
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
        with self._locks[part % NUM_LOCKS]:
            number, data = self._reordered
            if number != part:
                data = bytes_of(*self._tensors[part])
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
            value = Plain(archive)(archive.content)
        except Damaged as error:
            raise Damaged(
                f"{key}, in {entry.path} from {entry.offset} on: {error}", path=str(entry.path), atoms=(key,)
            ) from error
        if data:
            self._known[data] = value
        return value


def _in_c_order(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.strides, row_major(tensor.shape), strict=True)
    return all(n == 1 or stride == dense for n, stride, dense in pairs)
