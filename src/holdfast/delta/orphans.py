"""Orphans: replicas of several ranks whose trainers are gone, and how they find each other to make one more base.

There is no board any more, but there is the run's directory: each leaves notes in ``scratch/``, named after the
timeline, and reads those of the others. Who opens the run next removes them. Nobody waits for long for a replica that
may be gone as well, and less long when a trainer asks for the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from ..store.files import AnyDisk, write_durably
from .ranks import Ranks

LOOK_SECONDS = 0.02

HERE = "here"
"""What a replica says first when it is by itself."""


class Notes:
    """Of the replicas of ``ranks`` about one ``timeline``. ``asked`` says whether a trainer is waiting."""

    def __init__(self, disk: AnyDisk, timeline: int, ranks: Ranks, asked: Callable[[], bool]) -> None:
        self._disk, self._timeline, self._ranks, self._asked = disk, timeline, ranks, asked

    def leave(self, what: str, about: Any = None) -> None:
        path = self._path(what, self._ranks.rank)
        write_durably(self._disk, path, json.dumps(about).encode(), why="note")

    def of_all(self, what: str, seconds: float, when_asked: float) -> list[Any] | None:
        """What every rank has said, by rank; None if one does not within ``seconds``, or ``when_asked`` seconds since a
        trainer is waiting."""
        paths = [self._path(what, rank) for rank in range(self._ranks.world_size)]
        end = time.monotonic() + seconds
        while not all(self._disk.exists(path) for path in paths):
            if self._asked():
                end = min(end, time.monotonic() + when_asked)
            if time.monotonic() > end:
                return None
            time.sleep(LOOK_SECONDS)
        return [json.loads(self._disk.read_bytes(path)) for path in paths]

    def _path(self, what: str, rank: int) -> str:
        return path_of(what, self._timeline, rank)


def is_orphan(disk: AnyDisk, timeline: int, rank: int) -> bool:
    """Whether the replica of ``rank`` has said that its trainer is gone, or has closed without saving."""
    return disk.exists(path_of(HERE, timeline, rank))


def path_of(what: str, timeline: int, rank: int) -> str:
    return f"scratch/note-{what}-t{timeline:04d}-rank-{rank:05d}.json"
