"""The rates of the SSD: large reads, large writes, and both at once, as a run's queue makes them.

The page cache is bypassed. A file is written once, then read and overwritten, as a run does with its files. It is a
fraction of the drive and may lie in a faster cache of it: only a file of many gigabytes shows the sustained rate.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from ..errors import BadInput
from ..io.buffers import BufferPool
from ..io.queue import REQUEST_BYTES, IOQueue, Request
from ..io.threads import File, open_file
from ..quantities import PAGE, format_bytes
from ..store.disk import Disk
from .hardware_rates import median_seconds

THREADS = 4
GROUP_REQUESTS = 8
"""The requests of one transfer, as large as a small block's state; fewer where the file is small."""

REQUESTS_AT_ONCE = 2 * GROUP_REQUESTS
"""The requests under way in each region."""

LEAST_BYTES = 4 * REQUEST_BYTES
"""The least bytes of the file: two regions of two transfers."""


@dataclass(frozen=True)
class Ssd:
    """The rates of the SSD in bytes per second."""

    read: float
    write: float
    mixed: float
    """The rate of half reads and half writes, in all."""
    sync_seconds: float
    """The seconds until a small write is durable."""
    direct: bool
    """True if the page cache was bypassed. Otherwise the rates are those of memory."""
    file_bytes: int


def measure_ssd(directory: Path, file_bytes: int, seconds: float) -> Ssd:
    """Measure the file system of ``directory`` for about ``seconds``, with a file of at most ``file_bytes``.

    Nothing is left of the file, even if the process is killed. Raises ``BadInput`` if ``file_bytes`` is too little,
    and ``DiskFull``.
    """
    if file_bytes < LEAST_BYTES:
        raise BadInput(
            f"a file of {format_bytes(file_bytes)} is too small to measure by; give {format_bytes(LEAST_BYTES)}"
        )
    file, queue = _nameless(directory), IOQueue(THREADS)
    try:
        sweep = _Sweep(file, queue, file_bytes)
        filled = sweep.fill(file_bytes, seconds / 4)
        half, part = filled // 2, seconds / 4
        read = sweep.rate([(False, 0, filled)], part)
        write = sweep.rate([(True, 0, filled)], part)
        mixed = sweep.rate([(False, 0, half), (True, half, filled)], part)
        sync = median_seconds(lambda: _sync(Disk(directory), file), seconds / 20)
        return Ssd(read, write, mixed, sync, file.direct, filled)
    finally:
        queue.close()
        file.close()


def _nameless(directory: Path) -> File:
    """Open a new file without a name, which is gone when it is closed, even by a kill."""
    name = f"holdfast-probe-{secrets.token_hex(8)}"
    file = open_file(directory / name, write=True, create=True)
    Disk(directory).unlink(name)
    return file


class _Sweep:
    """Groups of requests over regions of a file, with some per region under way."""

    def __init__(self, file: File, queue: IOQueue, file_bytes: int) -> None:
        self.file, self.queue, self.pool = file, queue, BufferPool()
        requests = max(1, min(GROUP_REQUESTS, file_bytes // LEAST_BYTES))
        self.group_bytes, self.groups_at_once = requests * REQUEST_BYTES, REQUESTS_AT_ONCE // requests
        self.least_bytes = 4 * self.group_bytes

    def fill(self, nbytes: int, seconds: float) -> int:
        """Write as much of the file as ``seconds`` allow, and return the bytes written."""
        done, ends, most = 0, time.perf_counter() + seconds, nbytes - nbytes % self.group_bytes
        while done < most and (done < self.least_bytes or time.perf_counter() < ends):
            self._group(True, done).result()
            done += self.group_bytes
        return done

    def rate(self, regions: list[tuple[bool, int, int]], seconds: float) -> float:
        """Return the bytes per second over ``regions`` (write, start, stop), moving the same amount in each."""
        turns, at_once = cycle(regions), sum(self._at_once(stop - begin) for _, begin, stop in regions)
        offsets = {region: region[1] for region in regions}
        pending: deque[Future] = deque()
        moved, start = 0, time.perf_counter()
        while not moved or time.perf_counter() - start < seconds:
            while len(pending) < at_once:
                region = next(turns)
                write, begin, stop = region
                pending.append(self._group(write, offsets[region]))
                following = offsets[region] + self.group_bytes
                offsets[region] = following if following + self.group_bytes <= stop else begin
            pending.popleft().result()
            moved += self.group_bytes
        elapsed = time.perf_counter() - start
        for future in pending:
            future.result()
        return moved / elapsed

    def _at_once(self, nbytes: int) -> int:
        """Return the number of groups under way in a region, so that no part is in use twice."""
        return max(1, min(self.groups_at_once, nbytes // self.group_bytes))

    def _group(self, write: bool, offset: int) -> Future:
        buffer = self.pool.take(self.group_bytes, "probe")
        views = [buffer.view[at : at + REQUEST_BYTES] for at in range(0, self.group_bytes, REQUEST_BYTES)]
        requests = [
            Request(self.file, view, offset + i * REQUEST_BYTES, write) for i, view in enumerate(views)
        ]
        return self.queue.submit(
            requests, kind="probe", phase="probe", priority=0, finish=lambda: self.pool.give(buffer)
        )


def _sync(disk: Disk, file: File) -> None:
    """Write a page and make it durable."""
    pool = BufferPool()
    buffer = pool.take(PAGE, "probe")
    file.write(buffer.view, 0)
    disk.sync(file, why="a measurement")
    pool.give(buffer)
