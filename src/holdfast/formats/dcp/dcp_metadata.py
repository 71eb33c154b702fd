"""The claims of ``.metadata`` in a folder of ``torch.distributed.checkpoint``, checked against the sizes of its files.

A pickle from elsewhere may claim anything. So no memory is allocated for a claim, and no file is read, before the claim
was compared with what is there, and a tensor must be covered exactly once. Called by the readers of such folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing, HoldfastError
from ...state.layout.regions import Region
from ...state.tensor_entries import DTYPE_BYTES
from ..entry_keys import ShapeAndType
from ..torch_archive import pickles
from ..torch_archive.archives import PICKLE_BYTES
from ..torch_archive.pickles import PickledObject

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata."
_TABLES = (f"{_CLASSES}Metadata", "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata")
_WHOLE = "whole"
"""The place of an entry that is no chunk."""
_MOST = 1 << 62
"""A limit that no size or offset reaches."""


@dataclass(frozen=True)
class DcpEntry:
    """A range of a file that is one archive."""

    path: Path
    offset: int
    nbytes: int


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
                raise self._damaged(
                    f"says that {box.elements} elements of {key} are in {entry.nbytes} bytes of {entry.path.name} from"
                    f" {entry.offset} on"
                )
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
