"""Sources that are made of files: parts are ranges of files, read in place and verified by their writers' checksums.

Two rules hold: no byte of a part with a checksum is returned before the whole part was verified, and no byte of a file
that was rewritten since it was opened.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..errors import ChunkCorrupt, Damaged, DiskFailed, FileMissing
from ..io.threads import File, open_file
from ..quantities import MiB, shown
from .source import Checksums, Source, StoredArray

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
