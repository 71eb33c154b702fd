"""Drives of a run: what each takes, measured once for a list of them, and which units live on it. Bytes, seconds.

What is found is kept with the run, so that a unit stays where it is from one resume to the next. Only another list of
drives is measured anew; units that live elsewhere by it are written there when the run goes on. Several ranks have the
same drives, by what the first of them finds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..errors import BadInput, DoesNotFit
from ..io.drives import DriveQueues
from ..io.queue import IOQueue
from ..plan.drives import shares_of_state, spread
from ..plan.ops import SSD_READ, SSD_WRITE, as_guessed
from ..probe.ssd import LEAST_BYTES, measure_ssd
from ..ranks import Ranks
from ..store.drives import HOME, Drive, directories_for, record_of
from ..store.entering import see_drives
from ..store.files import Disk
from ..store.generations import Generations
from ..units import MiB, format_bytes
from ..update.threads import one_torch_thread
from .auto import Limits, nearest, to_standard_error
from .parts import Parts
from .planning import Plan

SECONDS = 1.0
"""Of a measurement of one drive."""

FILE_BYTES = 256 * MiB
OF_STATE = ("load_state", "store_state", "store_resident", "load_frozen")
"""Kinds of operation whose bytes are in generation files; all others on the SSD stay on the run's own drive."""


@dataclass(frozen=True)
class Drives:
    """The drives of a run, its own first; none where there is only that. Shares count once they are ``decided``."""

    all: tuple[Drive, ...] = ()
    decided: bool = True
    folders_of: dict[str, str] = field(default_factory=dict)
    """By the name of a unit's files, the folder in which they are; empty where all are in the run's own."""

    @classmethod
    def of(
        cls,
        ssd: str | Path,
        drives: Sequence[str | Path],
        limits: Limits,
        say: Callable[[str], object] | None,
        ranks: Ranks,
    ) -> Drives:
        """Of a run in ``ssd`` that may use ``drives`` too: as the run has them, or measured and not shared out yet.
        Called on all ``ranks``; what the first finds holds for all.

        Raises ``BadInput`` and its kin."""
        with ranks.agreeing():
            found = ranks.first_takes_its_time(partial(cls._found, ssd, drives, limits, say))
        return ranks.everyone(found or cls())[0]

    @classmethod
    def _found(
        cls,
        ssd: str | Path,
        drives: Sequence[str | Path],
        limits: Limits,
        say: Callable[[str], object] | None,
    ) -> Drives:
        if isinstance(drives, (str, Path)):
            raise BadInput(f"drives={drives!r} is one directory; give a list of them")
        if not drives:
            return cls()
        disk = Disk(ssd)
        wanted = {HOME: str(disk.root), **directories_for(disk, drives)}
        known = record_of(disk)
        if {drive.folder: drive.directory for drive in known} == wanted:
            return cls(known)
        _warn_of_one_file_system(wanted)
        (say or to_standard_error)(f"measuring {len(wanted)} drives for a few seconds, once")
        return cls(
            tuple(
                Drive(folder, directory, int(rate_of(Path(directory), limits)), 0.0)
                for folder, directory in wanted.items()
            ),
            decided=False,
        )

    def queue(self, ssd: str | Path, threads: int, limits: Limits) -> IOQueue:
        """What moves all bytes of the run: threads and limits are those of each drive."""
        if not self.all:
            return IOQueue(threads, *limits, prepare=one_torch_thread)
        root = Disk(ssd).root
        return DriveQueues(
            [root / folder for folder in self.folders], threads, *limits, prepare=one_torch_thread
        )

    @property
    def folders(self) -> list[str]:
        """By which the run names others than its own."""
        return [drive.folder for drive in self.all[1:]]

    @property
    def speed_up(self) -> float:
        """What all take, over what the first does."""
        rates = [drive.bytes_per_second for drive in self.all]
        return sum(rates) / rates[0] if rates else 1.0

    def shared_out(self, plan: Plan, parts: Parts, ranks: Ranks) -> Drives:
        """With the part of the state that each has, where that is not known yet, and the units of this rank that lie on
        it. Called on all ``ranks``. Raises ``RunMismatch`` if one does not see the drives of the first."""
        if not self.all:
            return self
        if not ranks.alone:
            see_drives({d.directory: nearest(Path(d.directory)) for d in self.all[1:]}, ranks)
        sizes = [unit.layout.file_bytes for unit in parts.all_units]
        told = ranks.everyone((*moved_bytes(plan), sizes))
        shares = [drive.share for drive in self.all]
        if not self.decided:
            rates = [drive.bytes_per_second for drive in self.all]
            shares = [*shares_of_state(rates, sum(state for state, _, _ in told), sum(o for _, o, _ in told))]
        places = spread([each for _, _, each in told], shares)[ranks.rank]
        folders = {}
        for unit, place in zip(parts.all_units, places, strict=True):
            folders[unit.file_name] = folders[unit.frozen_name] = self.all[place].folder
        decided = tuple(replace(d, share=share) for d, share in zip(self.all, shares, strict=True))
        return Drives(decided, True, folders)

    def needed(self, stored: dict[str, Generations]) -> list[int]:
        """Of each other drive, what ``create`` will take there."""
        return [
            sum(unit.missing_bytes() for unit in stored.values() if unit.folder == folder)
            for folder in self.folders
        ]


def moved_bytes(plan: Plan) -> tuple[int, int]:
    """What a step of this rank moves to and from the SSD: of the state, and others."""
    moved = [op for op in as_guessed(plan.operations) if op.lane in (SSD_READ, SSD_WRITE)]
    state = sum(op.nbytes for op in moved if op.key.kind in OF_STATE)
    return state, sum(op.nbytes for op in moved) - state


def rate_of(directory: Path, limits: Limits) -> float:
    """Bytes per second that the drive of ``directory`` takes, half of them reads, within ``limits``."""
    there = nearest(directory)
    free = Disk(there).free_bytes()
    if free < 2 * LEAST_BYTES:
        raise DoesNotFit(
            f"there is too little room on the drive {directory} to measure it: {format_bytes(free)} are free, and"
            f" {format_bytes(2 * LEAST_BYTES)} are needed. Free some, or leave it out of drives=."
        )
    found = measure_ssd(there, min(FILE_BYTES, free // 2), SECONDS)
    read, write, both = limits
    one_way = [2.0 * limit for limit in (read, write) if limit is not None]
    return max(1.0, min([found.mixed, *one_way, *([] if both is None else [float(both)])]))


def _warn_of_one_file_system(wanted: dict[str, str]) -> None:
    devices: dict[int, str] = {}
    for directory in wanted.values():
        other = devices.setdefault(device_of(directory), directory)
        if other != directory:
            warnings.warn(
                f"the drives {other} and {directory} are on one file system, so they share what it takes: a directory"
                " on another disk is of use",
                stacklevel=7,
            )


def device_of(directory: str) -> int:
    """A number of the file system on which ``directory`` is or would be."""
    return os.stat(nearest(Path(directory))).st_dev
