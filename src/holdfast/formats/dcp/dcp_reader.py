"""Reader of folders of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and ``*.distcp`` files, in place.

Each entry of a file is an archive of ``torch.save`` with one tensor or value. Folders may have a million entries, so an
entry is opened when it is first read. Until then the claims of ``.metadata`` are checked against the sizes of the
files; on opening they are checked against the archive. The CRC-32 of an entry is checked before any of its bytes is
used. ``DcpFolder`` is opened by ``formats.readers``; ``Entries`` and ``Values`` also serve the Megatron reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import Damaged
from ...quantities import KiB, counted
from ...state.layout.fragments import Fragments, dense, row_major
from ...state.tensor_entries import DTYPE_BYTES, TensorEntry
from ..entry_keys import PROGRESS, name_all
from ..source import NUM_LOCKS, SourceTensor, StoredArray, WithNumbers, looking_at
from ..state_dict_progress import add_or_tell, progress_of, state_dict_of
from ..torch_archive.archives import Archive, Plain, bytes_of
from ..torch_archive.pickles import Tensor
from .dcp_metadata import METADATA, Claims, DcpEntry, Shards


def is_dcp(path: Path) -> bool:
    """Return whether ``path`` is such a folder, complete or not."""
    return (path / METADATA).is_file() or any(path.glob("__*_*.distcp"))


class Entries(WithNumbers):
    """A folder whose tensors are entries of files."""

    def __init__(self, path: str, format: str) -> None:
        super().__init__(path, format)
        self._entries: dict[int, tuple[str, DcpEntry, tuple[int, ...]]] = {}
        self._tensors: dict[int, tuple[Archive, Tensor]] = {}
        self._reordered: tuple[int, bytes] = (-1, b"")

    def add_shards(self, key: str, shards: Shards) -> Fragments:
        """Add the chunks of the tensor ``key`` as fragments, without opening them."""
        pieces, (shape, dtype) = [], shards.kind
        for chunk in shards.chunks:
            if chunk.entry is not None:
                nbytes = chunk.box.elements * DTYPE_BYTES[dtype]
                part = self.add_part(StoredArray(str(chunk.entry.path), chunk.entry.offset, nbytes, dtype))
                self._entries[part] = key, chunk.entry, chunk.box.shape
                pieces.append(dense(chunk.box, part))
        return Fragments.of(pieces, len(shape))

    def read(self, part: int, offset: int, into: memoryview) -> None:
        if part not in self._entries:
            return super().read(part, offset, into)
        with self._naming(part), self._locks[part % NUM_LOCKS]:
            where = self._open(part)
            if part not in self.checked and len(into) != where.nbytes:
                super().check(part)
                self.checked.add(part)
        with self._naming(part):
            if part in self._tensors:
                into[:] = memoryview(self._in_order(part))[offset : offset + len(into)]
            else:
                super().read(part, offset, into)

    def check(self, part: int) -> None:
        if part not in self._entries:
            return super().check(part)
        with self._naming(part), self._locks[part % NUM_LOCKS]:
            self._open(part)
            if part in self._tensors:
                self._in_order(part)
            super().check(part)
            self.checked.add(part)

    @contextmanager
    def _naming(self, part: int) -> Iterator[None]:
        """Add the tensor's key and its file to errors that are raised inside."""
        key, entry, _ = self._entries[part]
        try:
            with looking_at(entry.path):
                yield
        except Damaged as error:
            raise type(error)(
                f"{key}, in {entry.path} from {entry.offset} on: {error}",
                path=error.path, offset=error.offset, nbytes=error.nbytes, atoms=(key,),
            ) from error  # fmt: skip

    def _open(self, part: int) -> StoredArray:
        """Open an entry and return its part; the archive must agree with the claims of ``.metadata``."""
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
        """Return all bytes of a part in C order, where they are stored in another. The last result is cached."""
        with self._locks[part % NUM_LOCKS]:
            number, data = self._reordered
            if number != part:
                data = bytes_of(*self._tensors[part])
                self._reordered = part, data
            return data


def _in_c_order(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.strides, row_major(tensor.shape), strict=True)
    return all(n == 1 or stride == dense for n, stride, dense in pairs)


REMEMBERED = 64 * KiB
"""The largest entry without tensors, in bytes, whose content is cached, as equal ones recur."""


class Values:
    """Reader of entries that are no tensors, as JSON."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def read(self, key: str, entry: DcpEntry) -> Any:
        """Return the value of ``entry``. Raises ``Damaged``, which names ``key``."""
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


class DcpFolder(Entries):
    """The folder ``path``; ``progress["roots"]`` tells which keys were read as the model's and the optimizer's."""

    def __init__(self, path: Path, *folders: Path) -> None:
        """Read ``.metadata`` of ``path``, or of all ``folders`` below it, whose keys are one state.

        Raises ``Damaged`` if it claims what the files lack, or does not cover a tensor exactly once.
        """
        super().__init__(str(path), "dcp")
        first, *others = folders or (path,)
        claims = Claims(first)
        for each in others:
            claims.add(Claims(each))
        ranks = {file.name.split("_")[2] for file in first.glob("__*_*.distcp")}
        theirs = f"torch.distributed.checkpoint, files of {counted(len(ranks), 'rank')}"
        self.writer = "holdfast" if PROGRESS in claims.values else theirs
        values = Values()
        rest = {key: values.read(key, entry) for key, entry in claims.values.items()}
        with state_dict_of(str(path)):
            self._take(claims, rest)

    def _take(self, claims: Claims, rest: dict[str, Any]) -> None:
        """Build tensor entries and progress; ``rest`` holds the entries that are no tensors."""
        kinds = {key: shards.kind for key, shards in claims.tensors.items()}
        named = name_all(kinds, claims.paths, rest, self.path)
        for key, shards in claims.tensors.items():
            name, slot = named.tensors[key]
            stored = SourceTensor(TensorEntry(name, slot, *shards.kind), self.add_shards(key, shards))
            add_or_tell(self, key, stored, rest)
        self.progress = progress_of(
            {key: rest[key] for key in claims.paths if key in rest}, claims.paths, named, self.path
        )
