"""The zip files that ``torch.save`` writes, whose tensors are stored uncompressed and can be read in place.

An archive is a whole file or a range of one (an entry of a ``.distcp`` file of DCP). Its entries carry CRC-32 sums,
which torch writes but does not check when it reads.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import Damaged
from ...state.layout.fragments import Fragment
from ...state.layout.regions import Region
from ..source import MOST_EXPANDED, Source, StoredArray
from . import pickles

PICKLE_BYTES = 1 << 30
"""An upper limit for the size of a pickle that is stored beside tensors."""


class FileRange(io.RawIOBase):
    """A readable file over the bytes ``start`` to ``start + nbytes`` of another file."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._nbytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        count = max(0, min(len(into), self._nbytes - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(count)
        into[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True)
class ArchiveEntry:
    """One entry of an archive; ``offset`` counts from the start of the file that contains the archive."""

    offset: int
    nbytes: int
    crc32: int


class Archive:
    """An archive that ``torch.save`` wrote into ``path`` at ``start``; ``content`` is its pickle, read as data.

    ``name`` is the name, without its ending, that the file had when torch wrote it (``archive`` where it had no name).
    """

    def __init__(self, path: Path, start: int = 0, nbytes: int | None = None) -> None:
        """Index the archive and read its pickle.

        Raises ``Damaged`` if ``path`` is no archive or its pickle cannot be read.
        """
        self.path, self.name, self.nbytes = path, "", nbytes or 0
        self._entries: dict[str, ArchiveEntry] = {}
        self._numbers: dict[pickles.Storage, int] = {}
        size = path.stat().st_size
        if nbytes is None:
            nbytes = self.nbytes = size - start
        if start < 0 or nbytes < 0 or start + nbytes > size:
            raise Damaged(
                f"{path} has {size} bytes, and an entry of {nbytes} from {start} on", path=str(path)
            )
        try:
            with open(path, "rb") as file:
                self._index(file, start, nbytes)
                entry = self._entries["data.pkl"]
                if entry.nbytes > PICKLE_BYTES:
                    raise ValueError(f"its pickle has {entry.nbytes} bytes")
                file.seek(entry.offset)
                data = file.read(entry.nbytes)
                order = self._text(file, "byteorder")
        except (zipfile.BadZipFile, ValueError, KeyError, struct.error, NotImplementedError) as error:
            raise Damaged(
                f"{path} is no archive of torch.save: {error}. Files of torch before 1.6, and those written without"
                " the zip format, are read by loading and saving them again with torch.",
                path=str(path),
            ) from error
        if zlib.crc32(data) != entry.crc32:
            raise Damaged(
                f"{path}: the pickle of the archive fails its CRC-32. Take another copy of it; or, if it was saved"
                " under torch.serialization.set_crc32_options(False), load it with torch and save it without that.",
                path=str(path),
            )
        if order not in (None, b"little"):
            raise Damaged(
                f"{path} was written on a big-endian machine, which is not supported", path=str(path)
            )
        self.content = pickles.load(data, str(path))

    def part(self, storage: pickles.Storage) -> StoredArray:
        """Return where the bytes of ``storage`` are. Raises ``Damaged`` if there are fewer than ``storage`` claims."""
        entry = self._entries.get(f"data/{storage.key}")
        part = (
            None
            if entry is None
            else StoredArray(str(self.path), entry.offset, entry.nbytes, storage.dtype, entry.crc32)
        )
        if part is None or part.nbytes < storage.elements * part.itemsize:
            raise Damaged(
                f"{self.path} has no entry data/{storage.key} of {storage.elements} elements of {storage.dtype}",
                path=str(self.path),
            )
        return part

    def part_in(self, source: Source, storage: pickles.Storage) -> int:
        """Return the number of the part of ``source`` for the bytes of ``storage``, which is added at the first call.

        All calls are with one source. Raises as ``part``.
        """
        if storage not in self._numbers:
            self._numbers[storage] = source.add_part(self.part(storage))
        return self._numbers[storage]

    def _index(self, file: BinaryIO, start: int, nbytes: int) -> None:
        """Index the entries by name, without the folder that contains all of them, and find where their bytes begin."""
        with zipfile.ZipFile(io.BufferedReader(FileRange(file, start, nbytes))) as archive:
            for info in archive.infolist():
                self.name, _, name = info.filename.partition("/")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{info.filename} is compressed")
                if info.header_offset < 0:
                    raise ValueError(f"{info.filename} lies before it")
                file.seek(start + info.header_offset)
                local = file.read(30)
                if local[:4] != b"PK\x03\x04":
                    raise ValueError(f"{info.filename} has no header")
                offset = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
                outside = offset + info.file_size > nbytes
                if outside or name in self._entries:
                    raise ValueError(f"{info.filename} lies outside of it, or is there twice")
                self._entries[name] = ArchiveEntry(start + offset, info.file_size, info.CRC)

    def _text(self, file: BinaryIO, name: str) -> bytes | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        file.seek(entry.offset)
        return file.read(min(entry.nbytes, 100))


def piece_of(tensor: pickles.Tensor, part: int) -> Fragment:
    """Return the fragment that the elements of a pickled tensor are in ``part``, the part of its storage."""
    return Fragment(Region.whole(tensor.shape), part, tensor.offset, tensor.strides)


def check_inside(name: str, tensor: pickles.Tensor, part: StoredArray) -> None:
    """Raise ``Damaged`` if elements of the tensor ``name`` lie outside ``part``, or far outnumber the stored ones."""
    elements, stored = prod(tensor.shape), part.nbytes // part.itemsize
    spans = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum((n - 1) * stride for n, stride in spans)
    if elements and not 0 <= last < stored:
        raise Damaged(
            f"{part.path}: {name} {list(tensor.shape)} lies outside of what is stored", path=part.path
        )
    if elements > max(stored, MOST_EXPANDED):
        raise Damaged(
            f"{part.path}: {name} {list(tensor.shape)} is {elements} elements made of {stored} that are stored, which"
            f" is not read of more than {MOST_EXPANDED}. Save it with .contiguous().",
            path=part.path,
        )
