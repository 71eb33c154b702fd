"""Streaming writer of files that ``torch.load`` reads: an uncompressed zip of a pickle and the tensors.

The pickle names classes of torch alone, and is built without importing them. Equal content gives equal bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar

import numpy as np

from ...errors import BadInput
from ...quantities import MiB
from ...state.layout.fragments import row_major
from ...state.tensor_entries import DTYPE_BYTES, TORCH_NAMES
from ...store.disk import TEMPORARY, Disk, written_durably
from ..load import converted, read_flat
from ..source import Source, SourceTensor
from .pickles import STORAGES

CHUNK = 16 * MiB
ALIGNMENT = 64
_STORAGE = {name: kind for kind, name in STORAGES.items() if kind != "UntypedStorage"}


@dataclass(frozen=True, eq=False)
class Streamed:
    """A tensor of ``dtype`` (a safetensors name) whose bytes come from ``chunks``, in C order."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Any]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def streamed(source: Source, stored: SourceTensor, cast: str | None = None) -> Streamed:
    """Return a tensor entry as a stream that is read while it is written, converted to ``cast`` if set."""
    atom = stored.atom
    step = CHUNK // atom.itemsize

    def chunks() -> Iterator[Any]:
        for start in range(0, atom.elements, step):
            values = read_flat(source, stored, start, min(start + step, atom.elements))
            yield converted(values, atom.dtype, cast or atom.dtype).data

    return Streamed(cast or atom.dtype, atom.shape, chunks)


def save_torch(disk: Disk, path: str, content: Any) -> None:
    """Write ``content`` as the file ``path``, replacing any. Not durable until it is synced.

    ``content`` consists of dictionaries, lists, bytes, numbers (NumPy's are written as Python's), tensors and
    ``Streamed`` ones. Raises ``BadInput`` for other content, ``DiskFull`` and ``DiskFailed``.
    """
    pickled = _Pickled(Path(path).stem, content)
    with disk.made(path, pickled.nbytes) as file:
        pickled.write(file)


def save_torch_durably(disk: Disk, path: str, content: Any, check: Callable[[], None]) -> None:
    """Write ``content`` as the file ``path`` atomically and durably.

    ``check`` is called before the file gets its name. Raises as ``save_torch`` does, and ``RunLocked``.
    """
    pickled = _Pickled(Path(path).stem, content)
    with written_durably(disk, path, pickled.nbytes, why="payload") as file:
        with io.BufferedWriter(_InOrder(file), MiB) as stream:
            pickled.write(stream)
            end = stream.tell()
        check()
        disk.cut(path + TEMPORARY, end)


class _Pickled:
    """The content of a file ``name``: its pickle, and its tensors, which are read later."""

    def __init__(self, name: str, content: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump(content)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise BadInput(f"{name}.pt would hold what is no data: {error}") from error
        self._name, self._data, self._tensors = name, buffer.getvalue(), pickler.tensors
        self.nbytes = len(self._data) + sum(tensor.nbytes for tensor in self._tensors)

    def write(self, file: BinaryIO) -> None:
        name = self._name
        with zipfile.ZipFile(file, "w") as archive:
            _put(archive, f"{name}/data.pkl", [self._data], len(self._data))
            _put(archive, f"{name}/byteorder", [b"little"], 6)
            for number, tensor in enumerate(self._tensors):
                _put(archive, f"{name}/data/{number}", tensor.chunks(), tensor.nbytes)
            _put(archive, f"{name}/version", [b"3\n"], 2)


class _InOrder(io.RawIOBase):
    """A sequential stream over a file that is written at offsets."""

    def __init__(self, file: Any) -> None:
        self._file, self._at = file, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("its end is where writing ends")
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view, self._at)
        self._at += len(view)
        return len(view)


NUMBERS = {np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")}
"""NumPy dtypes whose numbers Python has with the same value."""


class Size(tuple):
    """A stand-in for ``torch.Size``."""


class _Named:
    """A global of torch in the pickle, by its name."""

    def __init__(self, module: str, name: str) -> None:
        self.text = f"{module}\n{name}\n"

    def __call__(self) -> None:
        """Do nothing; the reader of the pickle calls the named object."""


@dataclass(frozen=True)
class _Made:
    """An object that the reader builds by calling a global of torch."""

    function: _Named
    arguments: tuple[Any, ...]


_COMPLEX, _DEVICE = _Named("__builtin__", "complex"), _Named("torch", "device")
_REBUILD, _SIZE = _Named("torch._utils", "_rebuild_tensor_v2"), _Named("torch", "Size")
_ENCODE, _REBUILD_OF_BYTES = _Named("_codecs", "encode"), _Named("torch._utils", "_rebuild_tensor_v3")
_UNTYPED = _Named("torch.storage", "UntypedStorage")
_DTYPES = {dtype: _Named("torch", name) for dtype, name in TORCH_NAMES.items()}
_STORAGES = {dtype: _Named("torch", kind) for dtype, kind in _STORAGE.items()}
_PLAIN = (type(None), bool, int, float, str, tuple, list, dict, set, frozenset, type, OrderedDict, _Named)


class _Place:
    """A stand-in for a storage in the pickle."""

    def __init__(self, number: int, tensor: Streamed) -> None:
        self.number, self.tensor = number, tensor


_OfPython: Any = pickle._Pickler  # the one in C would import what is named


class _Pickler(_OfPython):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Streamed] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Place):
            return None
        dtype = obj.tensor.dtype
        if dtype not in _STORAGES:  # torch has no storage class for it
            return "storage", _UNTYPED, str(obj.number), "cpu", obj.tensor.nbytes
        return "storage", _STORAGES[dtype], str(obj.number), "cpu", prod(obj.tensor.shape)

    def save(self, obj: Any, **how: Any) -> None:
        is_number = isinstance(obj, np.generic) and obj.dtype.newbyteorder("=") in NUMBERS
        obj = obj.item() if is_number else obj
        super().save(_named_dtype(obj) if type(obj).__name__ == "dtype" else obj, **how)

    def save_named(self, obj: _Named) -> None:
        self.write(pickle.GLOBAL + obj.text.encode())
        self.memoize(obj)

    dispatch: ClassVar = {**_OfPython.dispatch, _Named: save_named}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in _PLAIN:
            return NotImplemented
        if type(obj) is bytes:  # protocol 2 has no bytes
            return _ENCODE, (obj.decode("latin1"), "latin1")
        if type(obj) is complex:
            return _COMPLEX, (obj.real, obj.imag)
        obj = obj if isinstance(obj, Size | Streamed) else _of_torch(obj)
        if isinstance(obj, _Made):
            return obj.function, obj.arguments
        if isinstance(obj, Size):
            return _SIZE, (tuple(obj),)
        if isinstance(obj, Streamed):
            self.tensors.append(obj)
            place = _Place(len(self.tensors) - 1, obj)
            arguments = (place, 0, obj.shape, row_major(obj.shape), False, OrderedDict())
            if obj.dtype not in _STORAGES:
                return _REBUILD_OF_BYTES, (*arguments, _DTYPES[obj.dtype])
            return _REBUILD, arguments
        raise BadInput(f"a {type(obj).__name__} is no data")


def _named_dtype(obj: Any) -> Any:
    """Return the stand-in for a torch dtype; any other object unchanged."""
    import torch

    return _Named("torch", str(obj).removeprefix("torch.")) if isinstance(obj, torch.dtype) else obj


def _of_torch(obj: Any) -> Any:
    """Return the stand-in for an object of torch; any other object unchanged."""
    import torch

    from ...state.plain_tensors import TO_NAME, host_bytes, unsupported_kind

    if isinstance(obj, torch.Size):
        return Size(obj)
    if isinstance(obj, torch.device):
        return _Made(_DEVICE, (str(obj),))
    if not isinstance(obj, torch.Tensor):
        return obj
    if obj.dtype not in TO_NAME or (kind := unsupported_kind(obj)):
        what = f"of {obj.dtype}" if obj.dtype not in TO_NAME else kind
        raise BadInput(f"a tensor that is {what} cannot be put into a file of torch here")
    flat = host_bytes(obj)
    return Streamed(TO_NAME[obj.dtype], tuple(obj.shape), lambda: iter([flat.data]))


def _put(archive: zipfile.ZipFile, name: str, chunks: Any, nbytes: int) -> None:
    """Write an entry whose bytes begin at a multiple of ``ALIGNMENT``, as torch aligns them."""
    info = zipfile.ZipInfo(name)
    info.file_size = nbytes
    large = nbytes > zipfile.ZIP64_LIMIT // 2
    used = archive.fp.tell() + 30 + len(name.encode()) + 4 + (20 if large else 0)  # pyrefly: ignore
    info.extra = struct.pack("<HH", 0x4246, -used % ALIGNMENT) + bytes(-used % ALIGNMENT)
    with archive.open(info, "w", force_zip64=large) as entry:
        for chunk in chunks:
            entry.write(chunk)
