"""The stored training state of any format, as tensor entries whose elements lie in parts.

A reader of a format only describes what is stored; planning and reading are the same for all (``formats.load``).
Nothing of a source is executed. No memory is allocated for a claim of a source before the claim was checked against the
sizes of its files.
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
