"""Ranges: verified bytes from anywhere in the payload files of a commit, for many threads at once.

Bytes are verified by whole checksum blocks, so the blocks at the two ends of a range are read in full. The last few of
those are kept: the next range most often begins where this one ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import closing

import xxhash

from ..errors import FileMissing
from .files import AnyDisk
from .generations import corrupt
from .layout import CHECKSUM_BLOCK, Layout
from .manifest import FileRef
from .reading import INSPECT, check_size

KEPT_BLOCKS = 16
"""At the ends of ranges; 64 MiB."""
NUM_LOCKS = 64
"""Blocks that are read at once, about; two that share a lock wait for one another."""


class VerifiedFiles:
    """Payload files, each open while it is read. ``bytes_read`` are those that were verified."""

    def __init__(self, disk: AnyDisk) -> None:
        self._disk = disk
        self._layouts: dict[str, Layout] = {}
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._reading = [threading.Lock() for _ in range(NUM_LOCKS)]
        self._lock = threading.Lock()
        self.bytes_read = 0

    def layout(self, ref: FileRef) -> Layout:
        """Where its tensors lie, verified. Raises ``FileMissing`` if it is absent or of another size, ``Damaged``."""
        if ref.path not in self._layouts:
            check_size(self._disk, ref)
            self._layouts[ref.path] = Layout.parse(self._header(ref))
        return self._layouts[ref.path]

    def read(self, ref: FileRef, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on. Raises ``Damaged``, by then with any bytes in it."""
        stop = offset + len(into)
        if not 0 <= offset <= stop <= ref.bytes:
            raise FileMissing(
                f"{ref.path} has {ref.bytes} bytes, and {offset} to {stop} are asked for. {INSPECT}",
                path=ref.path,
            )
        position = offset
        while position < stop:
            block = position // CHECKSUM_BLOCK
            start, end = _span(ref, block)
            piece = into[position - offset : min(end, stop) - offset]
            if len(piece) == end - start:
                self._read(ref, block, piece)
            else:
                piece[:] = self._block(ref, block)[position - start : position - start + len(piece)]
            position += len(piece)

    def _block(self, ref: FileRef, block: int) -> bytes:
        """A whole block, read by one thread for all that want it."""
        key = ref.path, block
        with self._reading[hash(key) % NUM_LOCKS]:  # of two that want a block one reads it
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            start, end = _span(ref, block)
            data = bytearray(end - start)
            self._read(ref, block, memoryview(data))
            with self._lock:
                self._kept[key] = kept = bytes(data)
                while len(self._kept) > KEPT_BLOCKS:
                    self._kept.popitem(last=False)
            return kept

    def _read(self, ref: FileRef, block: int, data: memoryview) -> None:
        start = block * CHECKSUM_BLOCK
        with closing(self._disk.open(ref.path, write=False, direct=False)) as file:
            file.read(data, start)
        got = xxhash.xxh3_64_hexdigest(data)
        with self._lock:
            self.bytes_read += len(data)
        if got != ref.checksums[block]:
            known = self._layouts.get(ref.path)  # not while its header is read
            atoms = [] if known is None else known.keys_between(start, start + len(data))
            raise corrupt(ref.path, start, len(data), atoms, ref.checksums[block], got, INSPECT)

    def _header(self, ref: FileRef) -> bytearray:
        """The first blocks of the file, as many as the header needs: nearly always one."""
        header = bytearray()
        for block in range(len(ref.checksums)):
            header += self._block(ref, block)
            if 8 + int.from_bytes(header[:8], "little") <= len(header):
                break
        return header


def _span(ref: FileRef, block: int) -> tuple[int, int]:
    start = block * CHECKSUM_BLOCK
    return start, min(start + CHECKSUM_BLOCK, ref.bytes)
