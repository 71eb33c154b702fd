"""Reader of folders of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and ``*.distcp`` files, in place.

A pickle from elsewhere may claim anything. So no memory is allocated for a claim of ``.metadata``, and no file is read,
before the claim was compared with the sizes of the files, and a tensor must be covered exactly once.

Each entry of a file is an archive of ``torch.save`` with one tensor or value. Folders may have a million entries, so an
entry is opened when it is first read; then the claims are checked against the archive. The CRC-32 of an entry is
checked before any of its bytes is used. ``DcpFolder`` is opened by ``formats.readers``; ``Entries`` and ``Values`` also
serve the Megatron reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing, HoldfastError
from ...quantities import KiB, counted
from ...state.layout.fragments import Fragment, Fragments, dense, row_major
from ...state.layout.regions import Region, whole_blocks
from ...state.tensor_entries import DTYPE_BYTES, TensorEntry
from ..entry_keys import PROGRESS, ShapeAndType, name_all
from ..source import NUM_LOCKS, SourceTensor, StoredArray, WithNumbers, looking_at
from ..state_dict_progress import add_or_tell, progress_of, state_dict_of
from ..torch_archive import pickles
from ..torch_archive.archives import PICKLE_BYTES, Archive, Plain, bytes_of, check_inside
from ..torch_archive.pickles import PickledObject, Tensor, quantised_class, quantised_parts

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata."
_TABLES = (f"{_CLASSES}Metadata", "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata")
_WHOLE = "whole"
"""The place of an entry that is no chunk."""
_MOST = 1 << 62
"""A limit that no size or offset reaches."""


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
        archive = entry.archive()
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
            archive = entry.archive()
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
        opened: dict[str, Fragments] = {}
        for key in sorted(claims.quantised):
            opened |= self._open_quantised(key, claims, rest)
        kinds = {key: shards.kind for key, shards in claims.tensors.items()}
        named = name_all(kinds, claims.paths, rest, self.path)
        for key, shards in claims.tensors.items():
            name, slot = named.tensors[key]
            pieces = opened[key] if key in opened else self.add_shards(key, shards)
            stored = SourceTensor(TensorEntry(name, slot, *shards.kind), pieces)
            add_or_tell(self, key, stored, rest)
        self.progress = progress_of(
            {key: rest[key] for key in claims.paths if key in rest}, claims.paths, named, self.path
        )

    def _open_quantised(self, key: str, claims: Claims, rest: dict[str, Any]) -> dict[str, Fragments]:
        """Put the parts of the tensor ``key``, which torchao quantised, in its place, and return their fragments.

        Its class becomes an entry of ``rest``. Raises ``BadInput`` if its chunks are not quantised alike.
        """
        shards, way = claims.tensors.pop(key), claims.paths[key]
        shape, found = shards.kind.shape, dict[str, list[Fragment]]()
        for chunk in shards.chunks:
            if chunk.entry is None:
                continue
            archive = chunk.entry.archive()
            for part, tensor in quantised_parts(archive.content).items():
                name, kind = f"{key}.{part}", quantised_class(archive.content)
                whole, box = _part_of(key, shape, chunk.box, part, tensor.shape)
                number = archive.part_in(self, tensor.storage)
                check_inside(name, tensor, self.parts[number])
                first = claims.tensors.setdefault(name, Shards(ShapeAndType(whole, tensor.storage.dtype), ()))
                if first.kind != (whole, tensor.storage.dtype) or rest.setdefault(key, kind) != kind:
                    raise BadInput(f"{self.path}: the parts of {key} were not quantised alike")
                if part != TABLE or name not in found:
                    found.setdefault(name, []).append(Fragment(box, number, tensor.offset, tensor.strides))
                claims.paths[name] = (*way, part)
        return {
            name: Fragments.of(pieces, len(claims.tensors[name].kind.shape)) for name, pieces in found.items()
        }


TABLE = "qmap"
"""The part of a quantised tensor that all chunks hold alike."""


def _part_of(
    key: str, shape: tuple[int, ...], box: Region, part: str, held: tuple[int, ...]
) -> tuple[tuple[int, ...], Region]:
    """Return the shape of the whole ``part`` of a quantised tensor, and the region that ``held``, of its ``box``, is.

    Raises ``BadInput`` if these are no whole blocks of the tensor.
    """
    elements = prod(held)
    if part == TABLE or held == box.shape:
        return (held, Region.whole(held)) if part == TABLE else (shape, box)
    size = box.elements // elements if elements and not box.elements % elements and len(held) == 1 else 0
    blocks = whole_blocks(shape, box, size) if size else None
    if blocks is None:
        raise BadInput(
            f"{key}, {list(shape)}, was quantised by torchao in a way that cannot be read: its part {part} is"
            f" {list(held)}, and its chunk, {box.to_json()}, is not made of whole blocks. Save it from a number of"
            " ranks that divides its first dimension into whole blocks."
        )
    return (prod(shape) // size,), blocks


@dataclass(frozen=True)
class DcpEntry:
    """A range of a file that is one archive."""

    path: Path
    offset: int
    nbytes: int

    def archive(self) -> Archive:
        """Open the archive. Raises ``Damaged`` if it is none."""
        return Archive(self.path, self.offset, self.nbytes)


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor and its entry; None if the region is empty."""

    box: Region
    entry: DcpEntry | None


@dataclass(frozen=True)
class Shards:
    """A tensor in chunks."""

    kind: ShapeAndType
    chunks: tuple[Chunk, ...]


class Claims:
    """The tensors and other values that ``.metadata`` lists, by key, in the writer's order, with the path to each."""

    def __init__(self, folder: Path) -> None:
        """Read ``.metadata``. Raises ``Damaged`` if it is malformed or claims what the files lack."""
        self._folder, self._where = folder, folder / METADATA
        self.tensors: dict[str, Shards] = {}
        self.values: dict[str, DcpEntry] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        self.original_shapes: dict[str, tuple[int, ...]] = {}
        self.quantised: set[str] = set()
        """Keys of tensors that torchao quantised, which have fewer bytes than their elements would."""
        table = pickles.load(_read(self._where), str(self._where))
        try:
            self._take(table)
        except HoldfastError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
            raise self._damaged(f"does not read as one ({type(error).__name__}: {error})") from error

    def add(self, other: Claims) -> None:
        """Add the claims of another folder of the same state. Raises ``Damaged`` if both have a key."""
        if twice := sorted(self.paths.keys() & other.paths.keys()):
            raise other._damaged(f"has {twice[0]}, which {self._folder} has too")
        self.tensors |= other.tensors
        self.values |= other.values
        self.paths |= other.paths
        self.quantised |= other.quantised

    def _take(self, table: Any) -> None:
        if not isinstance(table, PickledObject) or table.name not in _TABLES:
            raise ValueError(f"it holds a {getattr(table, 'name', type(table).__name__)}")
        stored = self._stored(table.get("storage_data"))
        about = table.get("state_dict_metadata")
        wanted: set[tuple[str, str]] = set()
        for key, record in about.items():
            if record.name == f"{_CLASSES}BytesStorageMetadata":
                self.values[key] = self._entry_of(stored, key, None)
                wanted.add((key, _WHOLE))
            elif record.name == f"{_CLASSES}TensorStorageMetadata":
                self.tensors[key] = self._shards(key, record, stored)
                wanted |= {(key, _place(chunk.box.start)) for chunk in self.tensors[key].chunks}
                wanted.add((key, _WHOLE))
            else:
                raise ValueError(f"{key} is a {record.name}")
        for key, offset in stored.keys() - wanted:
            raise self._damaged(f"says where {key} from {offset} on is, and has no such chunk of it")
        paths = table.get("planner_data") or {}
        ordered = [key for key in paths if key in about] + [key for key in about if key not in paths]
        self.paths = {key: _path(paths.get(key), key) for key in ordered}
        for key, more in (table.get("mcore_data") or {}).items():
            if key in self.tensors and "nd_reformulated_orig_global_shape" in more:
                self.original_shapes[key] = ints(more["nd_reformulated_orig_global_shape"])

    def _shards(self, key: str, record: PickledObject, stored: Mapping[Any, DcpEntry]) -> Shards:
        dtype = record.get("properties").args[0][0]
        kind = ShapeAndType(ints(record.get("size")), dtype)
        itemsize, chunks = DTYPE_BYTES[dtype], []
        for chunk in record.get("chunks"):
            start, sizes = ints(chunk.get("offsets")), ints(chunk.get("sizes"))
            box = Region(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
            if len(start) != len(kind.shape):
                raise self._damaged(f"says of {key} {list(kind.shape)} that {list(start)} is a place in it")
            if not box.elements:
                chunks.append(Chunk(box, None))
                continue
            entry = self._entry_of(stored, key, start)
            if box.elements * itemsize > entry.nbytes:
                try:
                    parts = quantised_parts(entry.archive().content)
                except Damaged:
                    parts = {}
                if not parts:
                    raise self._damaged(
                        f"says that {box.elements} elements of {key} are in {entry.nbytes} bytes of {entry.path.name}"
                        f" from {entry.offset} on"
                    )
                self.quantised.add(key)
            chunks.append(Chunk(box, entry))
        return Shards(kind, tuple(chunks))

    def _entry_of(
        self,
        stored: Mapping[tuple[str, str], DcpEntry],
        key: str,
        start: tuple[int, ...] | None,
    ) -> DcpEntry:
        entry = stored.get((key, _place(start))) or stored.get((key, _WHOLE))
        if entry is None:
            place = "" if start is None else f" from {list(start)} on"
            raise self._damaged(f"does not say where {key}{place} is: a chunk is missing")
        return entry

    def _stored(self, table: dict[Any, Any]) -> dict[tuple[str, str], DcpEntry]:
        """Return the entries by key and place. Raises ``Damaged`` if they leave existing files or overlap."""
        sizes: dict[str, int] = {}
        found: dict[tuple[str, str], DcpEntry] = {}
        for index, info in table.items():
            key, offset = index.get("fqn"), index.get("offset")
            name, start, length = info.get("relative_path"), *ints((info.get("offset"), info.get("length")))
            if info.get("transform_descriptors"):
                raise BadInput(
                    f"{self._folder}: {key} went through {info.get('transform_descriptors')} when it was written. Load"
                    " it with torch and save it without extensions."
                )
            if name not in sizes:
                sizes[name] = self._size(name, key)
            if start + length > sizes[name]:
                raise self._damaged(
                    f"says that {key} is at {start} to {start + length} of {name}, which has {sizes[name]} bytes"
                )
            place = key, _place(None if offset is None else ints(offset))
            if place in found:
                raise self._damaged(f"says twice where {key} is")
            found[place] = DcpEntry(self._folder / name, start, length)
        self._refuse_overlaps(found)
        return found

    def _size(self, name: str, key: str) -> int:
        if Path(name).name != name:
            raise self._damaged(f"says that {key} is in {name!r}, which is not in the folder")
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            path = self._folder / name
            raise FileMissing(f"{path} is missing, which has {key}", path=str(path)) from None

    def _refuse_overlaps(self, found: Mapping[tuple[str, Any], DcpEntry]) -> None:
        ordered = sorted(found.items(), key=lambda item: (item[1].path.name, item[1].offset, item[1].nbytes))
        for (one, first), (two, second) in pairwise(ordered):
            if first.path == second.path and first.offset + first.nbytes > second.offset:
                raise self._damaged(
                    f"says that {one[0]} and {two[0]} are in the same bytes of {first.path.name}, from"
                    f" {second.offset} on"
                )

    def _damaged(self, what: str) -> Damaged:
        return Damaged(f"{self._where} {what}", path=str(self._where))


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > PICKLE_BYTES:
            raise Damaged(f"{path} has {size} bytes, more than any that torch writes", path=str(path))
        return path.read_bytes()
    except FileNotFoundError:
        if (path.parent / f"__0{METADATA}").exists():
            raise BadInput(
                f"{path.parent} was saved with use_collectives=False, so each rank has metadata of its own. Save it"
                " without that."
            ) from None
        raise FileMissing(f"{path} is missing: the save was not finished", path=str(path)) from None


def _place(start: tuple[int, ...] | None) -> str:
    """Return the start of a chunk as text, because a file's writer could choose colliding hashes of number tuples."""
    return _WHOLE if start is None else str(list(start))


def ints(values: Any) -> tuple[int, ...]:
    """Return ``values`` as sizes or offsets. Raises ``ValueError`` if they are none."""
    found = tuple(values)
    if any(type(value) is not int or not 0 <= value < _MOST for value in found):
        raise ValueError(f"{found} are no sizes")
    return found


def _path(path: Any, key: str) -> tuple[Any, ...]:
    """Return the names on the path to ``key``; the key alone where they are missing or do not fit."""
    if isinstance(path, tuple) and ".".join(map(str, path)) == key:
        return path
    return (key,)
