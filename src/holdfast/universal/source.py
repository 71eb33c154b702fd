"""Sources: stored training states, whoever wrote them, as atoms whose elements lie in parts.

A reader of a format says what there is, exactly; what is wanted of it is planned and read in one way for all
(``universal.load``). Nothing of a source is executed, and of what it claims nothing is allocated before it was checked
against the sizes of its files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..errors import Damaged
from ..state.atoms import DTYPE_BYTES, Atom
from ..state.pieces import Pieces

MOST_EXPANDED = 1 << 20
"""Elements at most of a tensor, or a region of one, that has more of them than are stored."""
MOST_OFFSET = float(1 << 62)
"""More than any place is at, in elements; below it nothing overflows."""


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
    passed_over: dict[str, str] = field(default_factory=dict)
    """By name the type of each tensor in it that has a type which no tensor has here: they are not read."""
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


class Made(Source):
    """What is made of whole tensors of another ``source``, which are read, and checked, where they lie."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.path, source.format, progress=dict(source.progress), unread=source.unread)
        self.unnested, self.passed_over = source.unnested, source.passed_over
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
