"""The rates of the drives of a run, and the drive on which each of its files lies.

Files go round the drives in proportion to their rates, so that in every stretch of files all drives are busy for about
the same time, and the files of several ranks lie on different drives. Pure, but for what measures. Called by the engine
and by ``Checkpointer`` for the list of drives that the first rank finds. Bytes, seconds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..errors import DoesNotFit
from ..quantities import MiB, format_bytes
from ..store.disk import AnyDisk, Disk
from ..store.drive_links import HOME, Drive, directories_for, record_of
from .ssd import LEAST_BYTES, measure_ssd

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
