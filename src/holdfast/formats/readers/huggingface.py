"""The writer of safetensors for Hugging Face: one file, or a folder that ``from_pretrained`` loads.

Files are written by several threads, each file under a temporary name until it is durable. An interrupted conversion
continues with the missing files. The header is written last, because it holds checksums: under ``holdfast.xxh3`` one
for every ``Wanted.stretch`` elements of each tensor, and one of the header itself.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ...errors import BadInput
from ...quantities import GiB, MiB, packed
from ...state.tensor_entries import DTYPE_BYTES, FLOATS
from ...store.disk import Disk, alone_in, write_durably, written_durably
from ...store.format.payload_layout import PAD
from ..load import converted, in_threads, read_flat
from ..source import Source, SourceTensor, places_of, with_aliases
from .safetensors_files import DIGITS, INDEX, KEYS, PROGRESS, SINGLE, XXH3, digest_of

CHUNK = 16 * MiB


@dataclass(frozen=True)
class Wanted:
    """A tensor entry to be written under ``key``, as ``dtype``."""

    key: str
    stored: SourceTensor
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.stored.atom.elements * DTYPE_BYTES[self.dtype]

    @property
    def stretch(self) -> int:
        """The number of elements that are copied at once: whole rows, unless one row is too long."""
        atom = self.stored.atom
        row = max(1, atom.elements // atom.shape[0]) if atom.shape and atom.shape[0] else 1
        step = max(1, CHUNK // atom.itemsize)
        return step // row * row or step

    @property
    def starts(self) -> range:
        return range(0, self.stored.atom.elements, self.stretch)


def write_huggingface(
    source: Source,
    folder: Path,
    *,
    dtype: str | None = None,
    file_bytes: int = 5 * GiB,
    report: Callable[[int], None] = lambda nbytes: None,
) -> list[Path]:
    """Write the parameters and buffers of ``source`` as a folder that ``from_pretrained`` loads. Durable on return.

    Several files get an index. Aliases of tied tensors are left out, as Hugging Face does. Files of an interrupted
    conversion with the same arguments are kept.

    Args:
        source: The state to write.
        folder: The folder to write to.
        dtype: Floating-point tensors are converted to it; None keeps theirs.
        file_bytes: The largest file, in bytes, except for a single larger tensor.
        report: Called with the number of bytes read.

    Raises ``BadInput`` if the folder holds other tensors, ``RunLocked`` if another conversion writes there.
    """
    wanted = [
        Wanted(stored.atom.name, stored, _cast(stored.atom.dtype, dtype))
        for stored in source.atoms.values()
        if stored.atom.slot in ("param", "buffer") and stored.atom.name not in source.aliases
    ]
    if not wanted:
        raise BadInput(f"{source.path} has no parameters to export")
    with alone_in(disk := Disk(folder)):
        names = _write_files(source, disk, wanted, dtype, file_bytes, report)
    return [folder / name for name in names]


def _write_files(
    source: Source,
    disk: Disk,
    wanted: list[Wanted],
    dtype: str | None,
    file_bytes: int,
    report: Callable[[int], None],
) -> list[str]:
    groups = list(packed(wanted, lambda each: each.nbytes, file_bytes))
    total = len(groups)
    names = (
        [SINGLE] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    )
    done = _Done(disk, [dtype, file_bytes, *_what(source, wanted)])
    _refuse_others(disk.root, source, done)
    for name, group in zip(names, groups, strict=True):
        if name in done.names and disk.exists(name):
            report(sum(each.stored.atom.nbytes for each in group))
            continue
        done.add(name)
        _write_file(source, disk, name, group, {"format": "pt"}, report)
    if total > 1:
        where = {each.key: name for name, group in zip(names, groups, strict=True) for each in group}
        size = sum(each.nbytes for each in wanted)
        text = json.dumps(
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}, indent=2
        )
        done.add(INDEX)
        write_durably(disk, INDEX, text.encode(), why="index")
    done.finish()
    return names


def _what(source: Source, wanted: Sequence[Wanted]) -> list[Any]:
    """Return what identifies a conversion, so that the files of another one are not kept as its own."""
    kinds = [(each.key, each.dtype) for each in wanted]
    return [source.identity(), kinds, places_of(each.stored for each in wanted)]


def _refuse_others(folder: Path, source: Source, done: _Done) -> None:
    """Raise ``BadInput`` if ``folder`` has tensors that this conversion did not write."""
    there = [path.name for path in folder.glob("*.safetensors")] if folder.is_dir() else []
    there += [INDEX] if (folder / INDEX).exists() else []
    others = sorted(set(there) - set(done.names))
    inside = {Path(part.path).parent.resolve() for part in source.parts if Path(part.path).exists()}
    if others or folder.resolve() in inside:
        what = others[0] if others else "what is to be converted"
        raise BadInput(
            f"{folder} has {what}, which would be mixed with what is written there. Name a folder that is not there, or"
            " empty it."
        )


def write_single(
    source: Source,
    path: Path,
    *,
    dtype: str | None = None,
    report: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Write all of ``source`` as one safetensors file. Durable on return.

    Parameters and buffers keep their names; optimizer tensors are stored under ``name/slot`` and keep their dtype. The
    metadata holds the progress and the aliases of tied weights. Raises ``BadInput`` if the file exists, ``RunLocked``
    if another conversion writes it.
    """
    _refuse_existing(path)
    wanted = []
    for key, stored in source.atoms.items():
        atom = stored.atom
        of_model = atom.slot in ("param", "buffer")
        wanted.append(
            Wanted(
                atom.name if of_model else key, stored, _cast(atom.dtype, dtype) if of_model else atom.dtype
            )
        )
    slots = {each.key: [each.stored.atom.name, each.stored.atom.slot] for each in wanted}
    metadata = {"format": "pt", KEYS: json.dumps(slots), PROGRESS: json.dumps(with_aliases(source))}
    disk = Disk(path.parent)
    disk.makedirs("")
    _write_file(source, disk, path.name, wanted, metadata, report)
    return path


def write_named(
    source: Source,
    path: Path,
    names: Mapping[str, str],
    *,
    dtype: str | None,
    report: Callable[[int], None],
) -> Path:
    """Write the tensor entries that ``names`` lists, under the names given there, as one safetensors file.

    Durable on return. Raises ``BadInput`` if the file exists, ``RunLocked`` if another conversion writes it.
    """
    _refuse_existing(path)
    atoms = [(name, source.atoms[key]) for key, name in names.items()]
    wanted = [Wanted(name, stored, _cast(stored.atom.dtype, dtype)) for name, stored in atoms]
    disk = Disk(path.parent)
    disk.makedirs("")
    _write_file(source, disk, path.name, wanted, {"format": "pt"}, report)
    return path


def _refuse_existing(path: Path) -> None:
    if path.is_dir():
        raise BadInput(f"{path} is a directory. Name a file that is not there.")
    if os.path.lexists(path):
        raise BadInput(f"{path} is there already. Name a file that is not there, or move that one away.")


def _cast(dtype: str, wanted: str | None) -> str:
    return wanted if wanted is not None and dtype in FLOATS else dtype


def _write_file(
    source: Source,
    disk: Disk,
    name: str,
    wanted: Sequence[Wanted],
    metadata: dict[str, str],
    report: Callable[[int], None],
) -> None:
    """Write one file, which is durable under its name on return."""
    sums: dict[str, list[str]] = {each.key: ["0" * DIGITS for _ in each.starts] for each in wanted}
    position = len(_header(wanted, metadata, sums))
    places = []
    for each in wanted:
        places.append(position)
        position += each.nbytes
    with written_durably(disk, name, position, why="payload") as file:
        _refuse_existing(disk.root / name)  # another conversion may have ended just now
        pairs = zip(wanted, places, strict=True)
        jobs = (job for each, at in pairs for job in _jobs(source, each, file, at, sums[each.key]))
        in_threads(jobs, report)
        source.refuse_rewritten()
        file.write(memoryview(_header(wanted, metadata, sums)), 0)


def _jobs(
    source: Source, wanted: Wanted, file: Any, offset: int, sums: list[str]
) -> Iterator[Callable[[], int]]:
    """Yield jobs that each copy one stretch of a tensor and fill in its checksum."""
    atom, size = wanted.stored.atom, DTYPE_BYTES[wanted.dtype]

    def copy(number: int, start: int) -> int:
        stop = min(start + wanted.stretch, atom.elements)
        values = read_flat(source, wanted.stored, start, stop)
        data = converted(values, atom.dtype, wanted.dtype)
        sums[number] = xxhash.xxh3_64_hexdigest(data.data)
        file.write(data.data, offset + start * size)
        return values.nbytes

    return (partial(copy, *each) for each in enumerate(wanted.starts))


def _header(wanted: Sequence[Wanted], metadata: dict[str, str], sums: dict[str, list[str]]) -> bytearray:
    """Return the header; its length does not depend on the values of the checksums."""
    table: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for each in wanted:
        if each.key in table or each.key.startswith(PAD):
            raise BadInput(f"{each.key} would be in one file twice, or is a reserved name")
        table[each.key] = {
            "dtype": each.dtype,
            "shape": list(each.stored.atom.shape),
            "data_offsets": [position, position + each.nbytes],
        }
        position += each.nbytes
    tensors = {each.key: [each.stretch * DTYPE_BYTES[each.dtype], "".join(sums[each.key])] for each in wanted}
    digests = json.dumps({"header": digest_of(table, tensors), "tensors": tensors}, separators=(",", ":"))
    table["__metadata__"] = {**metadata, XXH3: digests}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return bytearray(struct.pack("<Q", len(text)) + text)


class _Done:
    """The list of files that a conversion wrote, stored beside them until all are complete.

    A listed file that exists is complete, because it gets its name only then.
    """

    NAME = ".holdfast-conversion.json"

    def __init__(self, disk: Disk, what: list[Any]) -> None:
        self._disk, self.names = disk, list[str]()
        self._what = xxhash.xxh3_128_hexdigest(json.dumps(what).encode())
        if disk.exists(self.NAME):
            noted = json.loads(disk.read_bytes(self.NAME))
            self.names = noted["names"] if noted["what"] == self._what else []

    def add(self, name: str) -> None:
        """Add ``name`` to the stored list, before the file gets its name."""
        self.names.append(name)
        noted = {"what": self._what, "names": self.names}
        write_durably(self._disk, self.NAME, json.dumps(noted).encode(), why="conversion")

    def finish(self) -> None:
        self._disk.unlink(self.NAME)
