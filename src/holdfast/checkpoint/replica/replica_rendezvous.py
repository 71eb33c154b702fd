"""Rendezvous of the replicas of several ranks whose trainers are gone, to make one more snapshot.

The board is gone, but the run's directory exists. Each replica writes notes to ``scratch/``, named after the timeline,
and reads those of the others. The next process that opens the run removes the notes. No replica waits long for one that
may be gone as well, and less long when a trainer asks for the run. If one replica gives up, all do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...distributed import Ranks
from ...errors import HoldfastError
from ...store.disk import AnyDisk, write_durably
from ...store.lock import lock_of
from .. import running_clock

LOOK_SECONDS = 0.02

HERE = "here"
"""The first note of a replica without trainer."""

KEPT = "kept"
"""The note of a replica whose state is in memory: the first and the last step."""

GAVE_UP = "gave-up"
"""The note of a replica that ends the attempt to make a snapshot of all."""


class ReplicaLocks:
    """The locks of a run's replicas, which the system releases when a process ends.

    Locks held on another host may be invisible; such replicas are never reported as gone.
    """

    def __init__(self, disk: AnyDisk) -> None:
        self._disk = disk
        self._seen: set[int] = set()

    def gone(self, rank: int) -> bool:
        """Return whether the replica of ``rank`` held its lock before and does not now: it is done, or dead."""
        if self._disk.is_locked(lock_of(rank)):
            self._seen.add(rank)
            return False
        return rank in self._seen


class ReplicaNotes:
    """The notes of the replicas of ``ranks`` about one ``timeline``.

    ``asked`` returns whether a trainer is waiting.
    """

    def __init__(self, disk: AnyDisk, timeline: int, ranks: Ranks, asked: Callable[[], bool]) -> None:
        self._disk, self._timeline, self._ranks, self._asked = disk, timeline, ranks, asked
        self._locks = ReplicaLocks(disk)

    def leave(self, what: str, about: Any = None) -> None:
        path = self._path(what, self._ranks.rank)
        write_durably(self._disk, path, json.dumps(about).encode(), why="note")

    def give_up(self) -> None:
        """Tell the other replicas that there will be no snapshot of all, so that none waits for this rank."""
        with suppress(HoldfastError, OSError):  # the others see that its lock is free
            self.leave(GAVE_UP)

    def of_all(self, what: str, seconds: float, when_asked: float) -> list[Any] | None:
        """Return the note ``what`` of every rank, by rank.

        Returns None if a note is missing after ``seconds``, or ``when_asked`` seconds after a trainer began to wait, or
        if a replica has given up or is gone.
        """
        ranks = range(self._ranks.world_size)
        end = running_clock.now() + seconds
        while not any(self._says(GAVE_UP, rank) for rank in ranks):
            missing = [rank for rank in ranks if not self._says(what, rank)]
            if not missing:
                return [json.loads(self._disk.read_bytes(self._path(what, rank))) for rank in ranks]
            if any(self._locks.gone(rank) and not self._says(what, rank) for rank in missing):
                return None
            if self._asked():
                end = min(end, running_clock.now() + when_asked)
            if running_clock.now() > end:
                return None
            time.sleep(LOOK_SECONDS)
        return None

    def _says(self, what: str, rank: int) -> bool:
        return self._disk.exists(self._path(what, rank))

    def _path(self, what: str, rank: int) -> str:
        return path_of(what, self._timeline, rank)


def is_orphan(disk: AnyDisk, timeline: int, rank: int) -> bool:
    """Return whether the replica of ``rank`` has written that its trainer is gone, or has closed without saving."""
    return disk.exists(path_of(HERE, timeline, rank))


def has_kept(disk: AnyDisk, timeline: int, rank: int) -> bool:
    """Return whether the replica of ``rank`` has written that its state is in memory."""
    return disk.exists(path_of(KEPT, timeline, rank))


def path_of(what: str, timeline: int, rank: int) -> str:
    return f"scratch/note-{what}-t{timeline:04d}-rank-{rank:05d}.json"
