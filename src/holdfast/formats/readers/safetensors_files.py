"""Readers of safetensors: one file, a folder with an index, as Hugging Face's libraries write them, or DCP's shards.

A header is read as strictly as the safetensors library reads it, and bounded in size and memory. The metadata of a file
that ``huggingface`` wrote tells the role of each key, and holds checksums of the tensors and of the header. In other
files every tensor is a parameter, and flipped bits cannot be detected. In a folder the single file wins over an index,
as in transformers.

DCP's ``HuggingFaceStorageWriter`` writes each rank's shards in a safetensors file. Shards store where they begin in
their tensor; the size of a tensor follows only from the end of its last shard. A folder that lacks the files of the
last ranks therefore looks like one of smaller tensors: callers that know the shapes must compare them. Consolidated
folders are ordinary safetensors files. Opened by ``formats.readers``; headers and indexes are also read by other
readers of such folders.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...errors import Damaged, FileMissing
from ...quantities import MiB
from ...state.layout.fragments import Fragment, Fragments, dense
from ...state.layout.regions import Region
from ...state.tensor_entries import DTYPE_BYTES, TensorEntry
from ...store.format.payload_layout import TensorInFile, without_pads
from ..dcp.dcp_reader import ints
from ..entry_keys import ShapeAndType, name_all
from ..source import Checksums, ReadFiles, SourceTensor, StoredArray
from ..state_dict_progress import parsed_object, parsed_progress

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KEYS, PROGRESS, XXH3 = "holdfast.keys", "holdfast.progress", "holdfast.xxh3"
_UNREAD = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict)(_\d+)?\.(pt|bin)|optimizer_\d+|trainer_state\.json"
    r"|rng_state(_\d+)?\.pth|(random_states|custom_checkpoint)_\d+\.pkl|(pytorch_)?model_\d+\.(safetensors|bin)"
)
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"')
DIGITS = 16
"""The number of hexadecimal digits of a checksum."""
HEADER_BYTES = 100_000_000
"""The limit for the size of a header (that of the safetensors library)."""
OTHERS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of safetensors dtypes below one byte, which are unsupported here."""
BITS = {name: 8 * nbytes for name, nbytes in DTYPE_BYTES.items()} | OTHERS
"""Bits per element of every safetensors dtype."""
MOST = 1 << 62
"""A limit that no size or offset reaches."""


def is_safetensors(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


class SafetensorsFiles(ReadFiles):
    """The file ``path``, or the folder with its index."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), "safetensors")
        self.unread = unread_in(path)
        files, expected = files_of(path, SINGLE, INDEX)
        for file in files:
            self._add_file(file)
        if missing := sorted(expected - self._where):
            raise Damaged(f"{path}: its index names {missing[0]}, which is in no file", path=str(path))
        self.aliases = self.progress.pop("aliases", {})
        names = {stored.atom.name for stored in self.atoms.values()}
        if strangers := sorted(set(self.aliases.values()) - names):
            raise Damaged(
                f"{path}: {PROGRESS} ties something to {strangers[0]}, which it has not", path=str(path)
            )

    @property
    def _where(self) -> set[str]:
        return {
            stored.atom.name if stored.atom.slot == "param" else key for key, stored in self.atoms.items()
        } | self.passed_over.keys()

    def _add_file(self, path: Path) -> None:
        tensors, header = parts_of(path)
        metadata = header.metadata
        self.passed_over |= header.passed_over
        slots = parsed_object(metadata.get(KEYS), KEYS, str(path))
        self.progress |= parsed_progress(metadata.get(PROGRESS), PROGRESS, str(path))
        self.writer = self.writer or ("holdfast" if XXH3 in metadata else _library_of(path.parent))
        for entry, where in tensors:
            name, slot = _name_of(slots, entry.key, path)
            part = self.add_part(where)
            atom = TensorEntry(name, slot, entry.shape, entry.dtype)
            self.add(
                SourceTensor(atom, Fragments.of([dense(Region.whole(entry.shape), part)], len(entry.shape)))
            )


def unread_in(path: Path) -> tuple[str, ...]:
    """Return the names of files beside the weights from which transformers or accelerate would resume training."""
    return (
        tuple(sorted(each.name for each in path.iterdir() if _UNREAD.fullmatch(each.name)))
        if path.is_dir()
        else ()
    )


def _name_of(slots: dict[str, Any], key: str, path: Path) -> tuple[str, str]:
    """Return the name and the slot of the tensor ``key``."""
    found = slots.get(key, [key, "param"])
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(part, str) for part in found):
        raise Damaged(
            f"{path}: {KEYS} says that {key} is {found!r}, which is no name and slot", path=str(path)
        )
    return found[0], found[1]


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: its tensors in the order of their bytes."""

    entries: list[TensorInFile]
    metadata: dict[str, str]
    passed_over: dict[str, str]
    """Tensors of unsupported dtypes: dtype by name."""


def header_of(path: Path) -> Header:
    """Return the header of a safetensors file.

    Raises ``Damaged`` for a file that the safetensors library would refuse.

    Tensors of dtypes that are unknown to it are listed in ``passed_over`` and raise nothing.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
        if length > min(HEADER_BYTES, size - 8):
            raise Damaged(
                f"{path} is no safetensors file: of {size} bytes, {length} would be header", path=str(path)
            )
        header = file.read(length)
    try:
        table = _table_of(header)
        metadata = _metadata_of(table)
        entries, end = _entries_of(table, 8 + length)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
        raise Damaged(f"{path} does not read as a safetensors file: {why}", path=str(path)) from error
    if end != size:
        what = "it was cut short" if size < end else "something was put behind it"
        raise Damaged(f"{path} has {size} bytes, its header says {end}: {what}", path=str(path))
    if XXH3 in metadata and not _agrees(table, parsed_object(metadata[XXH3], XXH3, str(path))):
        raise Damaged(
            f"{path}: the header fails its checksum. Take another copy of it. If the file was changed on purpose, or"
            " made with the metadata of another, save it without the holdfast.xxh3 in its metadata.",
            path=str(path),
        )
    entries = without_pads(entries, 8 + length)
    known = [entry for entry in entries if entry.dtype in DTYPE_BYTES]
    others = {entry.key: entry.dtype for entry in entries if entry.dtype not in DTYPE_BYTES}
    return Header(known, metadata, others)


def _table_of(header: bytes) -> dict[str, Any]:
    """Return a header as JSON, as strictly as the safetensors library reads it. Raises ``ValueError``."""
    _refuse_many_lists(header)
    text = header.decode("utf-8")
    table = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    if type(table) is not dict:
        raise ValueError(f"it is a {type(table).__name__} and no object")
    for name in table:
        name.encode()  # raises for half of a surrogate pair, which other readers refuse
    return table


def _refuse_many_lists(header: bytes) -> None:
    """Raise ``ValueError`` if ``header`` has far more lists and objects than its tensors need.

    Parsing those would take twenty times its size in memory.
    """

    def has_many(text: bytes) -> bool:
        return 8 * (text.count(b"[") + text.count(b"{")) > len(header)

    if len(header) > MiB and has_many(header) and has_many(_TEXT.sub(b"", header)):
        raise ValueError("it has many more lists than tensors")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of ``pairs``.

    Raises ``ValueError`` for a repeated key, where readers differ in which value counts.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{again!r} is in it twice")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _metadata_of(table: dict[str, Any]) -> dict[str, str]:
    metadata = table.get("__metadata__")
    metadata = {} if metadata is None else metadata
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise ValueError("its __metadata__ is no object of texts")
    for text in (*metadata, *metadata.values()):
        text.encode()
    return metadata


def _entries_of(table: dict[str, Any], start: int) -> tuple[list[TensorInFile], int]:
    """Return the tensors of a header in the order of their bytes, and where the last one ends.

    The bytes begin at ``start``. Raises ``ValueError`` unless the tensors are adjacent and each has as many bytes as
    its shape needs.
    """
    entries = []
    for key, about in table.items():
        if key == "__metadata__":
            continue
        dtype, shape, (first, last) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        if type(dtype) is not str or type(about["shape"]) is not list:
            raise ValueError(f"tensor {key!r} has the type {dtype!r} and the shape {about['shape']!r}")
        if not all(type(number) is int and 0 <= number < MOST for number in (*shape, first, last)):
            raise ValueError(f"tensor {key!r} has the shape {list(shape)} and lies at {first} to {last}")
        entries.append(TensorInFile(key, dtype, shape, start + first, last - first))
    entries.sort(key=lambda entry: (entry.offset, entry.end))
    end = start
    for entry in entries:
        bits = BITS.get(entry.dtype)
        if bits is not None and (_elements(entry.shape) * bits != 8 * entry.nbytes):
            raise ValueError(
                f"tensor {entry.key!r} {list(entry.shape)} of {entry.dtype} has {entry.nbytes} bytes"
            )
        if entry.offset != end or entry.nbytes < 0:
            raise ValueError(f"tensor {entry.key!r} at {entry.offset} does not follow the one before it")
        end = entry.end
    return entries, end


def _elements(shape: tuple[int, ...]) -> int:
    """Return the product of ``shape``. Raises ``ValueError`` where it is too large, even before a last zero."""
    elements = 1
    for size in shape:
        elements *= size
        if elements >= MOST:
            raise ValueError(f"a shape of {list(shape)} is more than any tensor has")
    return elements


def _agrees(table: dict[str, Any], said: dict[str, Any]) -> bool:
    """Return whether a header matches its checksum."""
    try:
        return said.get("header") == digest_of(table, said.get("tensors"))
    except RecursionError:  # no writer nests so deep
        return False


def digest_of(table: dict[str, Any], tensors: Any) -> str:
    """Return the xxh3 of a header with the checksums of its ``tensors``, without its own."""
    metadata = {key: value for key, value in table["__metadata__"].items() if key != XXH3}
    text = json.dumps([{**table, "__metadata__": metadata}, tensors], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def parts_of(path: Path) -> tuple[list[tuple[TensorInFile, StoredArray]], Header]:
    """Return the tensors of a safetensors file, with their checksums if it has any, and its header."""
    header = header_of(path)
    metadata = header.metadata
    said = parsed_object(metadata.get(XXH3), XXH3, str(path)).get("tensors")
    found = []
    for entry in header.entries:
        sums = None if XXH3 not in metadata else _sums_of(entry, said, path)
        found.append((entry, StoredArray(str(path), entry.offset, entry.nbytes, entry.dtype, sums=sums)))
    return found, header


def _sums_of(entry: TensorInFile, said: Any, path: Path) -> Checksums:
    """Return the checksums of one tensor from ``said``, those of a whole file."""
    try:
        stretch, text = said[entry.key]
        if type(stretch) is not int or stretch < 1 or len(text) != DIGITS * -(-entry.nbytes // stretch):
            raise ValueError(f"{stretch} and {len(text)} digits")
        return Checksums(
            entry.key, stretch, tuple(text[at : at + DIGITS] for at in range(0, len(text), DIGITS))
        )
    except (TypeError, ValueError, KeyError) as error:
        raise Damaged(f"{path}: {XXH3} has no checksums of {entry.key}", path=str(path)) from error


def _library_of(folder: Path) -> str:
    """Return the library that wrote a Hugging Face folder, if its configuration tells it, else ""."""
    try:
        version = json.loads((folder / "config.json").read_text())["transformers_version"]
        return f"transformers {version}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


INDEX_BYTES = 100_000_000
"""An upper limit for the size of an index."""


def files_of(path: Path, single: str, index: str) -> tuple[list[Path], set[str]]:
    """Return the files of ``path`` and the keys that its index lists (none where no index applies).

    A file stands for itself. In a folder, ``single`` wins over ``index``, as in transformers, which leaves the index of
    an earlier save in place.

    Raises ``Damaged`` for an index that is none, ``FileMissing`` for a file that it names.
    """
    if path.is_file():
        return [path], set()
    if (path / single).is_file() or not (path / index).is_file():
        return [path / single], set()
    if (size := (path / index).stat().st_size) > INDEX_BYTES:
        raise Damaged(f"{path / index} is no index of files: it has {size} bytes", path=str(path / index))
    try:
        named = json.loads((path / index).read_text())["weight_map"]
        names = sorted(set(named.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file of it is not in the folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path / index} is no index of files: {error}", path=str(path / index)) from error
    for file in (path / name for name in names):
        if not file.is_file():
            raise FileMissing(f"{file} is missing, which the index names", path=str(file))
    return [path / name for name in names], set(named)


_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_INFO = "DCP_SHARDING_INFO"


def is_sharded(path: Path) -> bool:
    return path.is_dir() and any(_FILE.fullmatch(each.name) for each in path.iterdir())


class ShardedSafetensors(ReadFiles):
    """The folder ``path``, which holds parameters and buffers alone."""

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises ``FileMissing`` if a rank's files are missing (except the last), ``Damaged`` for bad shards.
        """
        super().__init__(str(path), "safetensors shards")
        self._pieces: dict[str, list[Fragment]] = {}
        self._dtypes: dict[str, str] = {}
        files = sorted(each for each in path.iterdir() if _FILE.fullmatch(each.name))
        _refuse_gaps(path, [each.name for each in files])
        self.writer = "HuggingFaceStorageWriter of torch"
        for file in files:
            self._add_file(file)
        kinds = {
            key: ShapeAndType(_shape_of(pieces), self._dtypes[key]) for key, pieces in self._pieces.items()
        }
        named = name_all(kinds, {key: (key,) for key in kinds}, {})
        for key, kind in kinds.items():
            atom = TensorEntry(*named.tensors[key], *kind)
            self.add(SourceTensor(atom, Fragments.of(self._pieces[key], len(kind.shape))))
        self.progress = {"roots": named.roots}

    def _add_file(self, path: Path) -> None:
        header = header_of(path)
        self.passed_over |= header.passed_over
        try:
            begins = {
                key: ints(item["saved_offsets"]) for key, item in json.loads(header.metadata[_INFO]).items()
            }
            for entry in header.entries:
                start = begins[entry.key]
                box = Region(start, tuple(a + n for a, n in zip(start, entry.shape, strict=True)))
                if self._dtypes.setdefault(entry.key, entry.dtype) != entry.dtype:
                    raise ValueError(f"{entry.key} is of {entry.dtype}, and of another type elsewhere")
                part = self.add_part(StoredArray(str(path), entry.offset, entry.nbytes, entry.dtype))
                self._pieces.setdefault(entry.key, []).append(dense(box, part))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Damaged(
                f"{path} does not say where its shards belong ({type(error).__name__}: {error})",
                path=str(path),
            ) from error


def _shape_of(pieces: list[Fragment]) -> tuple[int, ...]:
    return tuple(max(stops) for stops in zip(*(piece.box.stop for piece in pieces), strict=True))


def _refuse_gaps(path: Path, names: list[str]) -> None:
    """Raise ``FileMissing`` if a rank before the last has no file."""
    ranks = {int(match[1]) for name in names if (match := _FILE.fullmatch(name))}
    missing = set(range(1, max(ranks) + 1)) - ranks
    if missing:
        raise FileMissing(
            f"{path} has files of the ranks {sorted(ranks)}, and none of rank {min(missing)}: its shards are missing",
            path=str(path),
        )
