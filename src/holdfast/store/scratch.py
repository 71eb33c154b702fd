"""Scratch files: bytes that can be computed again, outside every commit.

Checksums live in memory and the file is emptied when it is opened, so nothing of an earlier process is ever trusted.
Nothing is synced. Offsets and sizes are bytes in whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import xxhash

from holdfast.errors import ChunkCorrupt
from holdfast.io.queue import REQUEST_BYTES, IOQueue, Request
from holdfast.quantities import PAGE
from holdfast.store.disk import AnyDisk


class Scratch:
    """The file ``scratch/<name>.bin`` of ``nbytes``.

    Bytes that are read must have been written in this process. Transfers are divided every 4 MiB from their offset. A
    read must match the division of the write: it has the same offset, or one that is a multiple of 4 MiB behind it.
    Different ranges may be in flight at once.
    """

    def __init__(self, disk: AnyDisk, queue: IOQueue, name: str, nbytes: int, *, direct: bool = True) -> None:
        self.path = f"scratch/{name}.bin"
        self.nbytes = nbytes
        self._disk, self._queue = disk, queue
        self._digests: dict[tuple[int, int], int] = {}
        disk.unlink(self.path)
        disk.allocate(self.path, nbytes)
        self._file = disk.open(self.path, direct=direct)

    def write(self, offset: int, view: memoryview, *, kind: str, phase: str, priority: int) -> Future[None]:
        """Write ``view`` at ``offset``; it must not change until the future is done."""
        requests = [
            Request(self._file, piece, position, True, partial(self._remember, position, piece))
            for position, piece in self._pieces(offset, view)
        ]
        return self._queue.submit(requests, kind=kind, phase=phase, priority=priority)

    def read(self, offset: int, view: memoryview, *, kind: str, phase: str, priority: int) -> Future[None]:
        """Fill ``view`` from ``offset`` and verify it against what was written.

        Raises ``ValueError`` for bytes that were not written, ``ChunkCorrupt`` for changed ones.
        """
        requests = []
        for position, piece in self._pieces(offset, view):
            expected = self._digests.get((position, len(piece)))
            if expected is None:
                raise ValueError(
                    f"{self.path}: {len(piece)} bytes at {position} are read that were not written as such"
                )
            check = partial(self._verify, position, piece, expected)
            requests.append(Request(self._file, piece, position, False, after=check))
        return self._queue.submit(requests, kind=kind, phase=phase, priority=priority)

    def close(self) -> None:
        """Close the file. No transfer may be under way."""
        self._file.close()

    def remove(self) -> None:
        """Remove the file after it was closed."""
        self._disk.unlink(self.path)

    def _pieces(self, offset: int, view: memoryview) -> Iterator[tuple[int, memoryview]]:
        if offset % PAGE or len(view) % PAGE or offset + len(view) > self.nbytes:
            raise ValueError(
                f"{self.path} of {self.nbytes} bytes: {len(view)} bytes at {offset} are not whole pages in it"
            )
        for start in range(0, len(view), REQUEST_BYTES):
            yield offset + start, view[start : start + REQUEST_BYTES]

    def _remember(self, position: int, piece: memoryview) -> None:
        self._digests[position, len(piece)] = xxhash.xxh3_64_intdigest(piece)

    def _verify(self, position: int, piece: memoryview, expected: int) -> None:
        got = xxhash.xxh3_64_intdigest(piece)
        if got != expected:
            raise ChunkCorrupt(
                f"derived bytes changed on the disk: expected xxh3:{expected:016x}, read xxh3:{got:016x} at"
                f" {self.path} offset {position}, {len(piece)} bytes. No commit holds them: check the device,"
                f" then run again to resume from the newest step.",
                path=self.path,
                offset=position,
                nbytes=len(piece),
            )
