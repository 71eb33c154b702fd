"""The liveness of replicas and ranks: which are there, which are slow, and which are gone.

Replicas whose trainers are gone meet to make one more snapshot. The board is gone by then, but the run's directory
exists: each replica writes notes to ``scratch/``, named after the timeline, and reads those of the others. If one gives
up, all do, and no replica waits long for one that may be gone. The next process that opens the run removes the notes.
While trainers live, ``StragglerMonitor`` reports a rank that is waited for: it warns of a slow one and raises for one
without heartbeat. Called by ``multi_rank_client`` and ``multi_rank_server``.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...distributed import Ranks
from ...errors import HoldfastError, RankFailed
from ...store.disk import AnyDisk, write_durably
from ...store.lock import lock_of
from .. import running_clock
from ..coordinator import PROBE_SECONDS, RankCoordinator

LOOK_SECONDS = 0.02
HERE = "here"
"""The first note of a replica without trainer."""
KEPT = "kept"
"""The note of a replica whose state is in memory: the first and the last step."""
GAVE_UP = "gave-up"
"""The note of a replica that ends the attempt to make a snapshot of all."""


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


def is_orphan(disk: AnyDisk, timeline: int, rank: int) -> bool:
    """Return whether the replica of ``rank`` has written that its trainer is gone, or has closed without saving."""
    return disk.exists(path_of(HERE, timeline, rank))


def has_kept(disk: AnyDisk, timeline: int, rank: int) -> bool:
    """Return whether the replica of ``rank`` has written that its state is in memory."""
    return disk.exists(path_of(KEPT, timeline, rank))


def path_of(what: str, timeline: int, rank: int) -> str:
    return f"scratch/note-{what}-t{timeline:04d}-rank-{rank:05d}.json"


GRACE_SECONDS = 2 * PROBE_SECONDS
"""The extra time that other ranks get beyond this rank's replica: the failing one knows the cause better."""


class StragglerMonitor:
    """Detects ranks that stopped making progress while this rank waits for them.

    The wait is for all ranks to have ``step``, and for snapshot ``number``, of ``base_step``, to end. Warns once about
    a slow rank.
    """

    def __init__(
        self, agreement: RankCoordinator, deadline_seconds: float, step: int, number: int, base_step: int
    ) -> None:
        self._agreement, self._deadline = agreement, deadline_seconds
        self._step, self._number, self._base_step = step, number, base_step
        self._sign: object = None
        self._since = self._began = running_clock.now()
        self._has_warned = False

    def check(self, durable_step: int) -> None:
        """Check the progress of the other ranks. Called repeatedly during the wait.

        Warns once of a slow rank. Raises ``RankFailed`` when a rank has sent no heartbeat for too long.
        ``durable_step`` is the step that survives in any case, for the message.
        """
        now, standing = running_clock.now(), self._agreement.standing
        sign = (standing.durable_step, standing.base_wanted, standing.missing)
        if sign != self._sign:
            self._sign, self._since = sign, now
        if now > self._since + self._deadline + GRACE_SECONDS:
            raise RankFailed(
                f"{self._who()}, and nothing was heard of it for {now - self._since:.0f} s: it is slow or has been"
                f" stopped, and has not ended. Step {durable_step} is durable on all ranks. See what that rank does,"
                " give a longer deadline_seconds=, and start all ranks again to resume."
            )
        if now > self._began + self._deadline and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._who()} for {now - self._began:.0f} s. It is slow and goes on, so it is waited for.",
                stacklevel=6,
            )

    def _who(self) -> str:
        standing = self._agreement.standing
        if standing.durable_step < self._step:
            return f"rank {standing.behind} has got to step {standing.durable_step} of {self._step}"
        if standing.base_wanted < self._number:
            return f"rank 0 has not begun the base of step {self._base_step}"
        if standing.missing:
            ranks = " and ".join(str(rank) for rank, _ in standing.missing)
            return f"rank {ranks} has not written its share of the base of step {self._base_step}"
        return f"rank 0 has not made a commit of the base of step {self._base_step}"
