"""Orphans: replicas of several ranks whose trainers are gone, and how they find each other to make one more base.

There is no board any more, but there is the run's directory: each leaves notes in ``scratch/``, named after the
timeline, and reads those of the others. Who opens the run next removes them. Nobody waits for long for a replica that
may be gone as well, and less long when a trainer asks for the run. What one gives up, all give up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import HoldfastError
from ..ranks import Ranks
from ..store.files import AnyDisk, write_durably
from ..store.lock import lock_of
from . import awake

LOOK_SECONDS = 0.02

HERE = "here"
"""What a replica says first when it is by itself."""

KEPT = "kept"
"""What it says when its state is in memory: from which step to which."""

GAVE_UP = "gave-up"
"""What it says when there will be no base of all from it."""


class Locks:
    """Of the replicas of a run, which the system drops with the process. Where those of another host are not seen,
    nobody is missed."""

    def __init__(self, disk: AnyDisk) -> None:
        self._disk = disk
        self._seen: set[int] = set()

    def gone(self, rank: int) -> bool:
        """Whether the replica of ``rank`` was seen at work, and is not any more: it is done, or dead."""
        if self._disk.is_locked(lock_of(rank)):
            self._seen.add(rank)
            return False
        return rank in self._seen


class Notes:
    """Of the replicas of ``ranks`` about one ``timeline``. ``asked`` says whether a trainer is waiting."""

    def __init__(self, disk: AnyDisk, timeline: int, ranks: Ranks, asked: Callable[[], bool]) -> None:
        self._disk, self._timeline, self._ranks, self._asked = disk, timeline, ranks, asked
        self._locks = Locks(disk)

    def leave(self, what: str, about: Any = None) -> None:
        path = self._path(what, self._ranks.rank)
        write_durably(self._disk, path, json.dumps(about).encode(), why="note")

    def give_up(self) -> None:
        """There will be no base of all: nobody needs to wait for this rank any more."""
        with suppress(HoldfastError, OSError):  # the others see that its lock is free
            self.leave(GAVE_UP)

    def of_all(self, what: str, seconds: float, when_asked: float) -> list[Any] | None:
        """What every rank has said, by rank; None if one does not within ``seconds``, or ``when_asked`` seconds since a
        trainer is waiting, or one has given up, or is gone."""
        ranks = range(self._ranks.world_size)
        end = awake.now() + seconds
        while not any(self._says(GAVE_UP, rank) for rank in ranks):
            missing = [rank for rank in ranks if not self._says(what, rank)]
            if not missing:
                return [json.loads(self._disk.read_bytes(self._path(what, rank))) for rank in ranks]
            if any(self._locks.gone(rank) and not self._says(what, rank) for rank in missing):
                return None
            if self._asked():
                end = min(end, awake.now() + when_asked)
            if awake.now() > end:
                return None
            time.sleep(LOOK_SECONDS)
        return None

    def _says(self, what: str, rank: int) -> bool:
        return self._disk.exists(self._path(what, rank))

    def _path(self, what: str, rank: int) -> str:
        return path_of(what, self._timeline, rank)


def is_orphan(disk: AnyDisk, timeline: int, rank: int) -> bool:
    """Whether the replica of ``rank`` has said that its trainer is gone, or has closed without saving."""
    return disk.exists(path_of(HERE, timeline, rank))


def has_kept(disk: AnyDisk, timeline: int, rank: int) -> bool:
    """Whether the replica of ``rank`` has said that what it had is in memory."""
    return disk.exists(path_of(KEPT, timeline, rank))


def path_of(what: str, timeline: int, rank: int) -> str:
    return f"scratch/note-{what}-t{timeline:04d}-rank-{rank:05d}.json"
