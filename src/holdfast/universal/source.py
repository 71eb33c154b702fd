"""Sources: stored training states, whoever wrote them, as atoms whose elements lie in parts.

A reader of a format says what there is, exactly; what is wanted of it is planned and read in one way for all
(``universal.load``). Nothing of a source is executed, and of what it claims nothing is allocated before it was checked
against the sizes of its files.
"""

from __future__ import annotations

import struct
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ChunkCorrupt, Damaged, FileMissing
from ..io.threads import open_file
from ..state.atoms import DTYPE_BYTES, Atom
from ..state.pieces import Pieces
from ..units import MiB

NUM_LOCKS = 16
"""Parts that are looked into at once, about; two that share a lock wait for one another."""


@dataclass(frozen=True)
class Part:
    """One stored array: ``nbytes`` bytes of the file ``path`` from ``offset`` on, of elements of ``dtype`` (a name of
    safetensors). ``crc32`` is what its writer says that its bytes have, where it says so."""

    path: str
    offset: int
    nbytes: int
    dtype: str
    crc32: int | None = None

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

    def read(self, part: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a part from ``offset`` on. Raises ``Damaged``, also where the format has a
        checksum over them that does not agree. Called from several threads."""
        raise NotImplementedError

    def check(self, part: int) -> None:
        """Raise ``Damaged`` if a part is not as it was written, as far as its format can tell."""
        raise NotImplementedError

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
        for pieces in (stored.pieces, *stored.copies):
            self._check(stored.atom.key, stored.atom, pieces)

    def _check(self, key: str, atom: Atom, pieces: Pieces) -> None:
        outside = (
            (pieces.stop > np.array(atom.shape, dtype=np.int64)).any(axis=1)
            if pieces.rank
            else np.zeros(1, bool)
        )
        last = pieces.offset + ((pieces.stop - pieces.start - 1) * pieces.strides).sum(axis=1)
        sizes = np.array(
            [self.parts[number].nbytes // atom.itemsize for number in pieces.part.tolist()], dtype=np.int64
        )
        if outside.any() or ((last >= sizes) | (pieces.offset < 0))[pieces.elements > 0].any():
            raise Damaged(
                f"{self.path}: of {key} {list(atom.shape)} something lies outside of it, or of what is stored"
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


@dataclass
class Files(Source):
    """A source whose parts are stretches of files as they are. Of a part with a checksum nothing is given before all of
    it was verified."""

    _verified: set[int] = field(default_factory=set, repr=False)
    _locks: list[threading.RLock] = field(
        default_factory=lambda: [threading.RLock() for _ in range(NUM_LOCKS)], repr=False
    )

    def read(self, part: int, offset: int, into: memoryview) -> None:
        where = self.parts[part]
        if not 0 <= offset <= offset + len(into) <= where.nbytes:
            raise Damaged(
                f"{where.path}: {offset} to {offset + len(into)} of {where.nbytes} bytes", path=where.path
            )
        if len(into) < where.nbytes:
            self.check(part)
        _read(where, offset, into)
        if where.crc32 is not None and len(into) == where.nbytes:
            check_sum(where, zlib.crc32(into))

    def check(self, part: int) -> None:
        """Raise ``Damaged`` if a part is not as it was written, as far as its format can tell."""
        where = self.parts[part]
        if where.crc32 is None:
            return
        with self._locks[part % NUM_LOCKS]:
            if part not in self._verified:
                found, buffer = 0, memoryview(bytearray(min(where.nbytes, 4 * MiB)))
                for start in range(0, where.nbytes, 4 * MiB):
                    piece = buffer[: min(4 * MiB, where.nbytes - start)]
                    _read(where, start, piece)
                    found = zlib.crc32(piece, found)
                check_sum(where, found)
                self._verified.add(part)


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


def _read(part: Part, offset: int, into: memoryview) -> None:
    try:
        with open_file(Path(part.path), write=False, create=False, direct=False) as file:
            file.read(into, part.offset + offset)
    except FileNotFoundError:
        raise FileMissing(f"{part.path} is missing", path=part.path) from None


def check_sum(part: Part, found: int) -> None:
    """Raise ``ChunkCorrupt`` if ``found`` is not the CRC-32 of ``part``."""
    if found != part.crc32:
        raise ChunkCorrupt(
            f"{part.path} at offset {part.offset}, {part.nbytes} bytes, fails its CRC-32: expected {part.crc32:08x},"
            f" read {found:08x}. The file is damaged; take another copy of it.",
            path=part.path,
            offset=part.offset,
            nbytes=part.nbytes,
        )
