"""Sources: stored training states, whoever wrote them, as atoms whose elements lie in parts.

A reader of a format says what there is, exactly; what is wanted of it is planned and read in one way for all
(``universal.load``). Nothing of a source is executed, and of what it claims nothing is allocated before it was checked
against the sizes of its files.
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
from ..state.atoms import DTYPE_BYTES, Atom
from ..state.pieces import Pieces
from ..units import MiB, shown

PIECE = 4 * MiB
"""Bytes that are read at once to be verified."""
MOST_EXPANDED = 1 << 20
"""Elements at most of a tensor, or a region of one, that has more of them than are stored."""
MOST_OFFSET = float(1 << 62)
"""More than any place is at, in elements; below it nothing overflows."""
NUM_LOCKS = 16
"""Parts that are looked into at once, about; two that share a lock wait for one another."""


class Sums(NamedTuple):
    """Of the tensor ``key`` the xxh3 of 64 bits, in hexadecimal, of every ``stretch`` bytes of it."""

    key: str
    stretch: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """One stored array: ``nbytes`` bytes of the file ``path`` from ``offset`` on, of elements of ``dtype`` (a name of
    safetensors). ``crc32`` or ``sums`` are what its writer says that its bytes have, where it says so."""

    path: str
    offset: int
    nbytes: int
    dtype: str
    crc32: int | None = None
    sums: Sums | None = None

    @property
    def has_checksum(self) -> bool:
        return self.crc32 is not None or self.sums is not None

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Stored:
    """An atom, and where its elements lie: ``pieces`` cover it once. ``copies`` are others that have to be equal (or,
    with ``average``, of which and the first the mean is the value)."""

    atom: Atom
    pieces: Pieces
    copies: tuple[Pieces, ...] = ()
    average: bool = False

    @property
    def every(self) -> tuple[Pieces, ...]:
        """The pieces of each copy, the first among them."""
        return self.pieces, *self.copies


@dataclass
class Source:
    """A stored training state, as the reader of a format found it. ``atoms`` are by key, ``progress`` what is known of
    the rest as JSON, ``aliases`` names of tensors that are others' under another name.

    Of ``progress`` these mean the same in all formats: ``step``, ``optimizer`` (its class), ``groups``
    (hyper-parameters by parameter group), ``group_parameters`` (the names of each), ``scheduler``; ``extra`` is what
    else there was.
    """

    path: str
    format: str
    atoms: dict[str, Stored] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """What rules may name of the configuration of its model, called as in config.json."""
    checked: set[int] = field(default_factory=set, repr=False, compare=False)
    """Parts that are known to be as they were written."""
    compared: set[str] = field(default_factory=set, repr=False, compare=False)
    """Keys of atoms whose copies are known to be equal."""
    writer: str = ""
    """For a person: what wrote it, as far as that is known."""
    unnested: set[str] = field(default_factory=set, repr=False, compare=False)
    """Slots of nested state that cannot be put together again."""
    unread: tuple[str, ...] = ()
    """Names of what lies beside it that has more of the training's state, and is not read."""

    def read(self, part: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a part from ``offset`` on. Raises ``Damaged``, also where the format has a
        checksum over them that does not agree. Called from several threads."""
        raise NotImplementedError

    def check(self, part: int) -> None:
        """Raise ``Damaged`` if a part is not as it was written, as far as its format can tell."""
        raise NotImplementedError

    def trust(self, parts: Iterable[int]) -> None:
        """Another process of this machine has checked ``parts`` of these files."""
        self.checked.update(parts)

    def refuse_rewritten(self) -> None:
        """Raise ``Damaged`` if a file of it was written again since it was opened: what was read may be of two states
        then. For whoever has read all of it, before that is taken for whole."""

    def identity(self) -> list[Any]:
        """What it is, as JSON: another source, and the same files written again, have another. No content is read."""
        files = []
        for path in sorted({part.path for part in self.parts if part.path}):
            with suppress(FileNotFoundError):
                status = os.stat(path)
                files.append([path, status.st_size, status.st_mtime_ns])
        return [self.path, self.progress, files]

    def add_part(self, part: Part) -> int:
        """Its number."""
        self.parts.append(part)
        return len(self.parts) - 1

    def add(self, stored: Stored) -> None:
        """Raises ``Damaged`` if there is one of that name and slot, or if its pieces do not cover it once, inside."""
        key = stored.atom.key
        if key in self.atoms:
            raise Damaged(f"{self.path} has {key} twice, under one name", path=self.path)
        self.check_cover(stored)
        self.atoms[key] = stored

    def check_cover(self, stored: Stored) -> None:
        """Raise ``Damaged`` if the pieces of ``stored`` do not cover it once, inside."""
        for pieces in stored.every:
            self._check(stored.atom.key, stored.atom, pieces)

    def _check(self, key: str, atom: Atom, pieces: Pieces) -> None:
        outside = (
            (pieces.stop > np.array(atom.shape, dtype=np.int64)).any(axis=1)
            if pieces.rank
            else np.zeros(1, bool)
        )
        reach = (pieces.stop - pieces.start - 1) * pieces.strides.astype(float)
        over = (np.maximum(reach, 0).sum(axis=1) + pieces.offset >= MOST_OFFSET) | (pieces.strides < 0).any(
            axis=1
        )
        last = pieces.offset + ((pieces.stop - pieces.start - 1) * pieces.strides).sum(axis=1)
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
    """The progress of ``source`` and its aliases, as they are written in one."""
    return source.progress | ({"aliases": dict(source.aliases)} if source.aliases else {})


@dataclass
class Files(Source):
    """A source whose parts are stretches of files as they are. Of a part with a checksum nothing is given before all of
    it was verified, and nothing of a file that was written again since it was opened."""

    _locks: list[threading.RLock] = field(
        default_factory=lambda: [threading.RLock() for _ in range(NUM_LOCKS)], repr=False
    )
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)
    """By file its size and the time when it was last written, as they were before anything of it was read."""

    def __post_init__(self) -> None:
        path = Path(self.path)
        with looking_at(path):
            files = [*path.iterdir()] if path.is_dir() else [path]
        for each in files:
            with suppress(OSError):
                self._stamps[str(each)] = _stamp_of(os.stat(each))

    def add_part(self, part: Part) -> int:
        if part.path and part.path not in self._stamps:
            with suppress(OSError):  # which is told when it is read
                self._stamps[part.path] = _stamp_of(os.stat(part.path))
        return super().add_part(part)

    def refuse_rewritten(self) -> None:
        for path in sorted({part.path for part in self.parts if part.path}):
            with looking_at(path), suppress(FileNotFoundError):  # what was read of it is still what was in it
                self._compare(path, os.stat(path))

    def _opened(self, part: Part) -> File:
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
        if self._stamps.setdefault(path, _stamp_of(status)) != _stamp_of(status):
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
        """Keys of the atoms that a part has something of."""
        for key, stored in self.atoms.items():
            if any((pieces.part == part).any() for pieces in stored.every):
                yield key


class Made(Source):
    """What is made of whole tensors of another ``source``, which are read, and checked, where they lie."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.path, source.format, progress=dict(source.progress), unread=source.unread)
        self.unnested = source.unnested
        self._source = source

    def made_of(self, part: int) -> Iterable[Stored]:
        """The tensors of the source that ``part`` is made of."""
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


@dataclass
class WithNumbers(Files):
    """Files, and parts that are in none of them: numbers that others keep beside their tensors."""

    _numbers: dict[int, bytes] = field(default_factory=dict, repr=False)

    def add_number(self, value: bool | int | float) -> int:
        """The number of a part of one F32 element, as torch's optimizers keep a count of steps."""
        part = self.add_part(Part("", 0, 4, "F32"))
        self._numbers[part] = struct.pack("<f", value)
        return part

    def read(self, part: int, offset: int, into: memoryview) -> None:
        if part in self._numbers:
            into[:] = self._numbers[part][offset : offset + len(into)]
        else:
            super().read(part, offset, into)


@contextmanager
def looking_at(path: object) -> Iterator[None]:
    """Whoever looks at ``path`` or below it meets ``DiskFailed`` where the system refuses that, unless it is gone."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        where, why = error.filename or path, error.strerror or error
        raise DiskFailed(f"cannot look at {where}: {why}. Make it readable, or check the device.") from error


def _stamp_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns  # not every file system keeps the number of an inode


def _check_all(part: Part, bytes_at: Callable[[int, int], memoryview], lying_in: Iterable[str]) -> None:
    """Raise ``ChunkCorrupt`` if the bytes of ``part``, which ``bytes_at`` gives by start and number, are not those
    that its checksums are of. ``lying_in`` are the keys of the atoms that it has something of."""
    if part.crc32 is not None:
        found = 0
        for start in range(0, part.nbytes, PIECE):
            found = zlib.crc32(bytes_at(start, min(PIECE, part.nbytes - start)), found)
        check_sum(part, found, lying_in)
    if part.sums is not None:
        for number in range(len(part.sums.digests)):
            _check_stretch(part, part.sums, number, bytes_at)


def _check_stretch(part: Part, sums: Sums, number: int, bytes_at: Callable[[int, int], memoryview]) -> None:
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


def check_sum(part: Part, found: int, lying_in: Iterable[str] = ()) -> None:
    """Raise ``ChunkCorrupt`` if ``found`` is not the CRC-32 of ``part``. ``lying_in``, the keys of atoms that it has
    something of, is gone through only then."""
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


def places_of(atoms: Iterable[Stored]) -> str:
    """A digest of what ``atoms`` are and where their elements lie."""
    digest = xxhash.xxh3_128()
    for stored in atoms:
        atom, each = stored.atom, stored.every
        digest.update(json.dumps([atom.key, atom.dtype, atom.shape, stored.average, len(each)]).encode())
        for pieces in each:
            for column in (pieces.start, pieces.stop, pieces.offset, pieces.strides, pieces.part):
                digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()
