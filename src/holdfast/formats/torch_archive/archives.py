"""The zip files that ``torch.save`` writes, whose tensors are stored uncompressed and can be read in place.

An archive is a whole file or a range of one (an entry of a ``.distcp`` file of DCP). Its entries carry CRC-32 sums,
which torch writes but does not check when it reads. ``Plain`` turns values of its pickle into JSON, in the form of
``state.encoding``: an object becomes its arguments, and nothing that a pickle names is imported or called. Tensors up
to a limit are stored by value; larger ones are left out and listed.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import BadInput, Damaged
from ...quantities import MiB
from ...state.encoding import tensor_json
from ...state.layout.fragments import Fragment
from ...state.layout.regions import Region
from ..source import MOST_EXPANDED, Source, StoredArray, check_sum
from . import pickles
from .pickles import Key, PickledObject, Tensor, is_distributed, quantised_class, quantised_parts

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


MOST_BEYOND = 16 * MiB
"""Limit for the bytes of tensors, counted each time that they are held, beyond the archive's own size."""
NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
"""NumPy's names of the number types that Python has as well."""


class Plain:
    """The converter for one archive.

    For tensors longer than ``longest`` bytes it writes shape and dtype alone and notes their place in ``left_out``.
    """

    def __init__(self, archive: Archive, longest: int | None = None) -> None:
        self._archive, self._longest = archive, longest
        self._room = archive.nbytes + MOST_BEYOND
        self.left_out: list[str] = []

    def __call__(self, value: Any, where: str = "") -> Any:
        """Return ``value`` as JSON.

        Raises ``Damaged`` if a tensor in it is damaged, ``BadInput`` for a distributed one.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, Key):
            return self(value.value, where)
        value = _bytes_in(value)
        if isinstance(value, PickledObject) and value.name.endswith(".multiarray.scalar"):
            return self._scalar(value, where)
        if isinstance(value, bytes | bytearray):
            return {"__bytes__": base64.b64encode(value).decode()}
        if isinstance(value, list | tuple):
            made = [self(item, f"{where}[{place}]") for place, item in enumerate(value)]
            return made if isinstance(value, list) else {"__tuple__": made}
        if isinstance(value, Counter):
            return {"__counter__": self(dict(value), where)}
        if isinstance(value, dict):
            plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
            items = [[self(key, where), self(item, f"{where}.{key}")] for key, item in value.items()]
            return dict(items) if plain else {"__dict__": items}
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        if is_distributed(value):
            raise BadInput(
                f"{self._archive.path} holds one rank's part of {where}, where only whole values are read. Save"
                " it as .full_tensor()."
            )
        if quantised_parts(value):
            return quantised_class(value)
        if isinstance(value, set | frozenset):
            items = sorted((self(item, where) for item in value), key=json.dumps)
            return {"__object__": type(value).__name__, "args": [items]}
        if not isinstance(value, PickledObject):
            return {"__object__": type(value).__name__, "args": [str(value)[:1000]]}
        given = {"args": list(value.args), "fields": value.fields, "items": value.items}
        parts = {name: self(part, f"{where}.{name}") for name, part in given.items() if part}
        return {"__object__": value.name, **parts}

    def _scalar(self, value: PickledObject, where: str) -> Any:
        """Return a NumPy number as Python's; for a dtype that Python has no number for, the object."""
        kind, data = (*value.args, None, None)[:2]
        name, order = _dtype_of(kind)
        if name not in NUMBERS:
            return self._object(value, where)
        dtype, data = np.dtype(order + name), _bytes_in(data)
        if not isinstance(data, bytes) or len(data) != dtype.itemsize:
            raise Damaged(f"{self._archive.path}: {where} is a number of {name} and has other bytes")
        return np.frombuffer(data, dtype)[0].item()

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        part = self._archive.part(tensor.storage)
        nbytes = prod(tensor.shape) * part.itemsize
        if self._longest is not None and max(nbytes, part.nbytes) > self._longest:
            self.left_out.append(where)
            return {"__object__": "tensor", "shape": list(tensor.shape), "dtype": part.dtype}
        self._room -= nbytes
        if self._room < 0:
            raise Damaged(
                f"{part.path} holds its tensors so many times over that they are more than {MOST_BEYOND} bytes beyond"
                f" its own {self._archive.nbytes}",
                path=part.path,
            )
        return tensor_json(tensor.storage.dtype, tensor.shape, bytes_of(self._archive, tensor))


def _bytes_in(value: Any) -> Any:
    """Return the bytes that old protocols write as a record; anything else unchanged."""
    if isinstance(value, PickledObject) and value.name == "_codecs.encode" and value.args:
        return str(value.args[0]).encode("latin1")
    return value


def _dtype_of(kind: Any) -> tuple[str, str]:
    """Return name and byte order of a NumPy dtype that is a record; empty names if it is none."""
    if not isinstance(kind, PickledObject) or kind.name != "numpy.dtype" or not kind.args:
        return "", ""
    state = kind.args[-1]
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "<"
    return str(kind.args[0]), ">" if order == ">" else "<"


def bytes_of(archive: Archive, tensor: Tensor) -> bytes:
    """Return the elements of ``tensor`` in C order, after its storage was verified. Raises ``Damaged``."""
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


def array_of_pickle(value: Any) -> np.ndarray:
    """Return the NumPy array that ``value`` describes. Raises ``ValueError`` if it describes none of numbers."""
    state = value.args[-1] if isinstance(value, PickledObject) and value.args else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("there is no array")
    _, shape, kind, fortran, data = state
    name, order = _dtype_of(kind)
    data = _bytes_in(data)
    if name not in NUMBERS or not isinstance(data, bytes):
        raise ValueError(f"an array of {name or 'objects'}")
    return np.frombuffer(data, np.dtype(order + name)).reshape(shape, order="F" if fortran else "C").copy()
