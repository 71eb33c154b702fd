"""The rates of drives, as a run's queue moves bytes, and the drive on which each file of a run lies.

A measurement bypasses the page cache. A file is written once, then read and overwritten, as a run does with its files.
It is a fraction of the drive and may lie in a faster cache of it: only a file of many gigabytes shows the sustained
rate.

Files go round the drives in proportion to their rates, so that in every stretch of files all drives are busy for about
the same time, and the files of several ranks lie on different drives. Called by the machine's probe, and by the engine
and ``Checkpointer`` for the list of drives that the first rank finds. Bytes, seconds.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from ..errors import BadInput, DoesNotFit
from ..io.buffers import BufferPool
from ..io.queue import REQUEST_BYTES, IOQueue, Request
from ..io.threads import File, open_file
from ..quantities import PAGE, MiB, format_bytes
from ..store.disk import AnyDisk, Disk
from ..store.drive_links import Drive, directories_for, record_of
from ..store.format.manifest import HOME
from .hardware_rates import median_seconds

SECONDS = 1.0
"""Duration of the measurement of one drive."""
FILE_BYTES = 256 * MiB
Limits = tuple[int | None, int | None, int | None]
"""The limits of reading, of writing and of both together, in bytes per second; None is none."""


def measured_drives(
    disk: AnyDisk, given: Sequence[str | Path], limits: Limits, say: Callable[[str], object]
) -> tuple[tuple[Drive, ...], bool]:
    """Return the drives of a run that may use those ``given`` too, its own first, and whether the run recorded them.

    Drives that it has not recorded are measured, and have shares in proportion to their rates. Nothing is written.

    Args:
        disk: The directory of the run.
        given: The directories of the other drives; without any, there are no drives.
        say: Receives a message before the measurement.

    Raises ``BadInput`` and its subclasses for drives that cannot be used.
    """
    if not given:
        return (), True
    wanted = {HOME: str(disk.root), **directories_for(disk, given)}
    known = record_of(disk)
    if {drive.folder: drive.directory for drive in known} == wanted:
        return known, True
    _warn_of_one_file_system(wanted.values())
    say(f"measuring {len(wanted)} drives for a few seconds, once")
    rates = [int(rate_of(Path(directory), limits)) for directory in wanted.values()]
    drives = (
        Drive(folder, directory, rate, rate / sum(rates))
        for (folder, directory), rate in zip(wanted.items(), rates, strict=True)
    )
    return tuple(drives), False


def rate_of(directory: Path, limits: Limits) -> float:
    """Measure the bytes per second that the drive of ``directory`` moves, half of them reads, within ``limits``.

    Raises ``DoesNotFit`` if the drive has too little room to measure it.
    """
    there = nearest(directory)
    free = Disk(there).free_bytes()
    if free < 2 * LEAST_BYTES:
        raise DoesNotFit(
            f"there is too little room on the drive {directory} to measure it: {format_bytes(free)} are free, and"
            f" {format_bytes(2 * LEAST_BYTES)} are needed. Free some, or leave it out of drives."
        )
    found = measure_ssd(there, min(FILE_BYTES, free // 2), SECONDS)
    read, write, both = limits
    one_way = [2.0 * limit for limit in (read, write) if limit is not None]
    return max(1.0, min([found.mixed, *one_way, *([] if both is None else [float(both)])]))


def nearest(directory: Path) -> Path:
    """Return ``directory``, or the nearest parent that exists."""
    directory = directory.absolute()
    while not directory.is_dir():
        directory = directory.parent
    return directory


def device_of(directory: str) -> int:
    """Return the number of the file system on which ``directory`` is or would be."""
    return os.stat(nearest(Path(directory))).st_dev


def _warn_of_one_file_system(directories: Iterable[str]) -> None:
    """Warn if two of ``directories`` are on one file system, since they share what it takes."""
    devices: dict[int, str] = {}
    for directory in directories:
        other = devices.setdefault(device_of(directory), directory)
        if other != directory:
            warnings.warn(
                f"the drives {other} and {directory} are on one file system, so they share what it takes: a directory"
                " on another disk is of use",
                stacklevel=8,
            )


def spread(sizes: Sequence[Sequence[int]], shares: Sequence[float]) -> list[list[int]]:
    """Return the drive of each unit of each rank, in the order in which a step goes through the units.

    It is the drive that is furthest behind its share, counting all ranks and this one together.

    >>> spread([[8, 8, 8, 8, 8, 8]], [1 / 3, 2 / 3])
    [[1, 0, 1, 1, 0, 1]]
    >>> spread([[8, 8, 8, 8], [8, 8, 8, 8]], [1 / 2, 1 / 2])
    [[0, 1, 0, 1], [1, 0, 1, 0]]
    """
    found: list[list[int]] = [[] for _ in sizes]
    placed, together = [[0] * len(shares) for _ in sizes], [0] * len(shares)
    for unit in range(len(sizes[0])):
        for rank, own in enumerate(placed):
            nbytes = sizes[rank][unit]
            wanted = sum(own) + sum(together) + 2 * nbytes
            behind = [share * wanted - (a + b) for share, a, b in zip(shares, own, together, strict=True)]
            drive = behind.index(max(behind))
            own[drive] += nbytes
            together[drive] += nbytes
            found[rank].append(drive)
    return found


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
