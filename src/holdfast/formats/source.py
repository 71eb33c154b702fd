"""The stored training state of any format, as tensor entries whose elements lie in parts.

A reader of a format only describes what is stored; planning and reading are the same for all (``formats.load``).
Nothing of a source is executed. No memory is allocated for a claim of a source before the claim was checked against the
sizes of its files.

Most sources are made of files (``ReadFiles``): parts are ranges of files, read in place and verified by their writers'
checksums. Two rules hold: no byte of a part with a checksum is returned before the whole part was verified, and no byte
of a file that was rewritten since it was opened.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..errors import ChunkCorrupt, Damaged, DiskFailed, FileMissing
from ..io.threads import File, open_file
from ..quantities import MiB, shown
from ..state.layout.fragments import Fragments
from ..state.tensor_entries import DTYPE_BYTES, TensorEntry

MOST_EXPANDED = 1 << 20
"""The limit of elements for a tensor, or a region, that has more elements than are stored (expanded)."""
MOST_OFFSET = float(1 << 62)
"""A limit for offsets, in elements, below which no arithmetic overflows."""


class Checksums(NamedTuple):
    """The checksums of the tensor ``key``: one 64-bit xxh3, in hexadecimal, for every ``stretch`` bytes."""

    key: str
    stretch: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class StoredArray:
    """One stored array: ``nbytes`` bytes of the file ``path`` from ``offset`` on, of elements of ``dtype``.

    ``dtype`` is a safetensors name. ``crc32`` or ``sums`` are the checksums that the writer stored, if any.
    """

    path: str
    offset: int
    nbytes: int
    dtype: str
    crc32: int | None = None
    sums: Checksums | None = None

    @property
    def has_checksum(self) -> bool:
        return self.crc32 is not None or self.sums is not None

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor entry and the place of its elements: ``pieces`` cover it exactly once.

    ``copies`` are further stored copies, which must be equal; with ``average`` the value is the mean of all copies.
    """

    atom: TensorEntry
    pieces: Fragments
    copies: tuple[Fragments, ...] = ()
    average: bool = False

    @property
    def every(self) -> tuple[Fragments, ...]:
        """The fragments of each copy, with the first."""
        return self.pieces, *self.copies


@dataclass
class Source:
    """A stored training state, as the reader of its format found it.

    ``atoms`` are tensor entries by key, ``progress`` is everything else as JSON, ``aliases`` maps further names of tied
    tensors to the first.

    These entries of ``progress`` have the same meaning in all formats: ``step``, ``optimizer`` (its class), ``groups``
    (hyper-parameters by parameter group), ``group_parameters`` (the names of each group), ``scheduler``, and ``extra``
    for the rest.
    """

    path: str
    format: str
    atoms: dict[str, SourceTensor] = field(default_factory=dict)
    parts: list[StoredArray] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """Numbers of the model's configuration that rules may name, called as in config.json."""
    checked: set[int] = field(default_factory=set, repr=False, compare=False)
    """Parts that were verified."""
    compared: set[str] = field(default_factory=set, repr=False, compare=False)
    """Keys of tensor entries whose copies were compared and are equal."""
    writer: str = ""
    """The program that wrote the source, for messages, as far as it is known."""
    unnested: set[str] = field(default_factory=set, repr=False, compare=False)
    """Slots of nested state that cannot be rebuilt."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """Tensors of unsupported dtypes, which are not read: dtype by name."""
    unread: tuple[str, ...] = ()
    """Names of files beside the source with further training state that is not read."""

    def read(self, part: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` with bytes of a part, from ``offset`` on. Called by several threads.

        Raises ``Damaged``, also where a checksum of the format does not match.
        """
        raise NotImplementedError

    def check(self, part: int) -> None:
        """Verify a part as far as its format can. Raises ``Damaged``."""
        raise NotImplementedError

    def trust(self, parts: Iterable[int]) -> None:
        """Mark ``parts`` as verified, because another process of this machine has checked them."""
        self.checked.update(parts)

    def refuse_rewritten(self) -> None:
        """Raise ``Damaged`` if a file was rewritten since it was opened, as what was read may mix two states.

        Call it after the last read, before the data is used.
        """

    def identity(self) -> list[Any]:
        """Return JSON that identifies the source; another source, or rewritten files, give another.

        No content is read.
        """
        files = []
        for path in sorted({part.path for part in self.parts if part.path}):
            with suppress(FileNotFoundError):
                status = os.stat(path)
                files.append([path, status.st_size, status.st_mtime_ns])
        return [self.path, self.progress, files]

    def add_part(self, part: StoredArray) -> int:
        """Add ``part`` and return its number."""
        self.parts.append(part)
        return len(self.parts) - 1

    def add(self, stored: SourceTensor) -> None:
        """Add a tensor entry.

        Raises ``Damaged`` if its key exists already or its fragments do not cover it exactly once.
        """
        key = stored.atom.key
        if key in self.atoms:
            raise Damaged(f"{self.path} has {key} twice, under one name", path=self.path)
        self.check_cover(stored)
        self.atoms[key] = stored

    def check_cover(self, stored: SourceTensor) -> None:
        """Raise ``Damaged`` unless the fragments of ``stored`` cover it exactly once and lie inside it and
        their parts.
        """
        for pieces in stored.every:
            self._check(stored.atom.key, stored.atom, pieces)

    def _check(self, key: str, atom: TensorEntry, pieces: Fragments) -> None:
        outside = (
            (pieces.stop > np.array(atom.shape, dtype=np.int64)).any(axis=1)
            if pieces.rank
            else np.zeros(1, bool)
        )
        reach = (pieces.stop - pieces.start - 1) * pieces.strides.astype(float)
        over = (np.maximum(reach, 0).sum(axis=1) + pieces.offset >= MOST_OFFSET) | (pieces.strides < 0).any(
            axis=1
        )
        last = pieces.offset + pieces.spans - 1
        sizes = np.array(
            [self.parts[number].nbytes // atom.itemsize for number in pieces.part.tolist()], dtype=np.int64
        )
        if outside.any() or ((last >= sizes) | (pieces.offset < 0) | over)[pieces.elements > 0].any():
            raise Damaged(
                f"{self.path}: of {key} {list(atom.shape)} something lies outside of it, or of what is stored"
            )
        if (pieces.elements > np.maximum(sizes, MOST_EXPANDED)).any():
            raise Damaged(
                f"{self.path}: {key} {list(atom.shape)} has many more elements than are stored of it, which is not read"
                f" of more than {MOST_EXPANDED}. Save it with .contiguous().",
                path=self.path,
            )
        if (found := int(pieces.elements.sum())) != atom.elements:
            raise Damaged(
                f"{self.path}: of {key} {list(atom.shape)} there are {found} elements stored, not {atom.elements}: a"
                " shard is missing, or is there twice",
                path=self.path,
            )
        if (pair := pieces.overlap()) is not None:
            raise Damaged(
                f"{self.path}: two shards of {key} meet: {pair[0].to_json()} and {pair[1].to_json()}",
                path=self.path,
            )


def with_aliases(source: Source) -> dict[str, Any]:
    """Return the progress of ``source`` with its aliases, as both are written together."""
    return source.progress | ({"aliases": dict(source.aliases)} if source.aliases else {})


class DerivedSource(Source):
    """A source built from whole tensors of another ``source``, which are read and verified in place."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.path, source.format, progress=dict(source.progress), unread=source.unread)
        self.unnested, self.passed_over = source.unnested, source.passed_over
        self._source = source

    def made_of(self, part: int) -> Iterable[SourceTensor]:
        """Return the tensors of the source that ``part`` is built from."""
        raise NotImplementedError

    def check(self, part: int) -> None:
        for number in sorted(self._within([part])):
            self._source.check(number)

    def trust(self, parts: Iterable[int]) -> None:
        super().trust(parts)
        self._source.trust(self._within(self.checked))

    def refuse_rewritten(self) -> None:
        self._source.refuse_rewritten()

    def _within(self, parts: Iterable[int]) -> set[int]:
        stored = (each for part in parts for each in self.made_of(part))
        return {number for each in stored for number in each.pieces.part.tolist()}


def places_of(atoms: Iterable[SourceTensor]) -> str:
    """Return a digest of ``atoms`` and the places of their elements."""
    digest = xxhash.xxh3_128()
    for stored in atoms:
        atom, each = stored.atom, stored.every
        digest.update(json.dumps([atom.key, atom.dtype, atom.shape, stored.average, len(each)]).encode())
        for pieces in each:
            for column in (pieces.start, pieces.stop, pieces.offset, pieces.strides, pieces.part):
                digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


PIECE = 4 * MiB
"""The number of bytes that are read at once during verification."""
NUM_LOCKS = 16
"""The approximate number of parts that are checked at once; two parts that share a lock wait for each other."""


@dataclass
class ReadFiles(Source):
    """A source whose parts are ranges of files.

    No byte of a part with a checksum is returned before the whole part was verified, and no byte of a file that was
    rewritten since it was opened.
    """

    _locks: list[threading.RLock] = field(
        default_factory=lambda: [threading.RLock() for _ in range(NUM_LOCKS)], repr=False
    )
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)
    """The size and modification time of each file, as they were before any of it was read."""

    def __post_init__(self) -> None:
        path = Path(self.path)
        with looking_at(path):
            files = [*path.iterdir()] if path.is_dir() else [path]
        for each in files:
            with suppress(OSError):
                self._stamps[str(each)] = _stamp_of(os.stat(each))

    def add_part(self, part: StoredArray) -> int:
        if part.path and part.path not in self._stamps:
            with suppress(OSError):  # the error is raised when the part is read
                self._stamps[part.path] = _stamp_of(os.stat(part.path))
        return super().add_part(part)

    def refuse_rewritten(self) -> None:
        for path in sorted({part.path for part in self.parts if part.path}):
            with looking_at(path), suppress(FileNotFoundError):  # bytes read before the removal still hold
                self._compare(path, os.stat(path))

    def _opened(self, part: StoredArray) -> File:
        try:
            with looking_at(part.path):
                file = open_file(Path(part.path), write=False, create=False, direct=False)
        except FileNotFoundError:
            raise FileMissing(f"{part.path} is missing", path=part.path) from None
        try:
            self._compare(part.path, os.fstat(file.fd))
        except BaseException:
            file.close()
            raise
        return file

    def _compare(self, path: str, status: os.stat_result) -> None:
        stamp = _stamp_of(status)
        if self._stamps.setdefault(path, stamp) != stamp:
            raise Damaged(
                f"{path} was written again meanwhile, or touched: its size or its time of writing changed, so what was"
                " read of it before may be of another state. Begin anew, when nobody writes to it.",
                path=path,
            )

    def read(self, part: int, offset: int, into: memoryview) -> None:
        where = self.parts[part]
        if not 0 <= offset <= offset + len(into) <= where.nbytes:
            raise Damaged(
                f"{where.path}: {offset} to {offset + len(into)} of {where.nbytes} bytes", path=where.path
            )
        if len(into) < where.nbytes:
            self.check(part)
        with self._opened(where) as file:
            file.read(into, where.offset + offset)
        if len(into) == where.nbytes:
            _check_all(where, lambda start, nbytes: into[start : start + nbytes], self._lying_in(part))

    def check(self, part: int) -> None:
        where = self.parts[part]
        if not where.has_checksum:
            return
        with self._locks[part % NUM_LOCKS]:
            if part not in self.checked:
                buffer = memoryview(bytearray(min(where.nbytes, PIECE)))
                with self._opened(where) as file:

                    def read(start: int, nbytes: int) -> memoryview:
                        file.read(buffer[:nbytes], where.offset + start)
                        return buffer[:nbytes]

                    _check_all(where, read, self._lying_in(part))
                self.checked.add(part)

    def _lying_in(self, part: int) -> Iterator[str]:
        """Yield the keys of the tensor entries that have a fragment in ``part``."""
        for key, stored in self.atoms.items():
            if any((pieces.part == part).any() for pieces in stored.every):
                yield key


@dataclass
class WithNumbers(ReadFiles):
    """A source with parts that are in no file: numbers that other writers keep beside their tensors."""

    _numbers: dict[int, bytes] = field(default_factory=dict, repr=False)

    def add_number(self, value: bool | int | float) -> int:
        """Add a part of one F32 element, as torch's optimizers count steps, and return its number."""
        part = self.add_part(StoredArray("", 0, 4, "F32"))
        self._numbers[part] = struct.pack("<f", value)
        return part

    def read(self, part: int, offset: int, into: memoryview) -> None:
        if part in self._numbers:
            into[:] = self._numbers[part][offset : offset + len(into)]
        else:
            super().read(part, offset, into)


@contextmanager
def looking_at(path: object) -> Iterator[None]:
    """Turn system errors about ``path`` or below it into ``DiskFailed``; ``FileNotFoundError`` passes through."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        where, why = error.filename or path, error.strerror or error
        raise DiskFailed(f"cannot look at {where}: {why}. Make it readable, or check the device.") from error


def _stamp_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns  # no inode number: not every file system keeps one


def _check_all(
    part: StoredArray, bytes_at: Callable[[int, int], memoryview], lying_in: Iterable[str]
) -> None:
    """Verify the checksums of ``part``. Raises ``ChunkCorrupt``.

    Args:
        part: The part to verify.
        bytes_at: Return the bytes of the part, given their start and number.
        lying_in: Keys of the tensor entries that have a fragment in the part.
    """
    if part.crc32 is not None:
        found = 0
        for start in range(0, part.nbytes, PIECE):
            found = zlib.crc32(bytes_at(start, min(PIECE, part.nbytes - start)), found)
        check_sum(part, found, lying_in)
    if part.sums is not None:
        for number in range(len(part.sums.digests)):
            _check_stretch(part, part.sums, number, bytes_at)


def _check_stretch(
    part: StoredArray, sums: Checksums, number: int, bytes_at: Callable[[int, int], memoryview]
) -> None:
    begin, end = (min(place * sums.stretch, part.nbytes) for place in (number, number + 1))
    digest = xxhash.xxh3_64()
    for start in range(begin, end, PIECE):
        digest.update(bytes_at(start, min(PIECE, end - start)))
    if digest.hexdigest() != sums.digests[number]:
        raise ChunkCorrupt(
            f"{sums.key} fails its checksum: expected xxh3:{sums.digests[number]}, read xxh3:{digest.hexdigest()} at"
            f" {part.path} offset {part.offset + begin}, {end - begin} bytes. The file is damaged: take another"
            " copy of it. If it was changed on purpose, save it without the holdfast.xxh3 in its metadata.",
            path=part.path, offset=part.offset + begin, nbytes=end - begin, atoms=(sums.key,),
        )  # fmt: skip


def check_sum(part: StoredArray, found: int, lying_in: Iterable[str] = ()) -> None:
    """Raise ``ChunkCorrupt`` if ``found`` is not the CRC-32 of ``part``.

    ``lying_in``, the keys of tensor entries with a fragment in the part, is iterated only then.
    """
    if found != part.crc32:
        atoms = tuple(lying_in)
        held = f" It holds {shown(atoms)}." if atoms else ""
        raise ChunkCorrupt(
            f"{part.path} at offset {part.offset}, {part.nbytes} bytes, fails its CRC-32: expected {part.crc32:08x},"
            f" read {found:08x}.{held} The file is damaged; take another copy of it.",
            path=part.path,
            offset=part.offset,
            nbytes=part.nbytes,
            atoms=atoms,
        )
