"""The live state of a standby, kept close behind the process that trains the run.

While a standby waits for the run's lock, its model is idle. A thread at low priority loads the newest snapshot into it
and replays the log records as they come, with the code of any recovery. What is left at a takeover are the records of
the last moment. Nothing depends on the thread: the recovery at the takeover compares the snapshot and the record that
the state is at with what the run holds then, and loads everything where they differ. Called by ``LogBackend``.

Of several ranks each one follows by itself, its own shard of the state, without collectives. Ranks may be at different
steps meanwhile; the recovery brings all of them to the same one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self

from ...accelerators import devices_of, use_device
from ...errors import Damaged, DiskFailed, HoldfastError, OtherArithmetic
from ...events import tell
from ...state.live_state import LiveState
from ...store.disk import AnyDisk
from ...store.format.manifest import CommitRef
from ...store.log.chain import Journal, read_journal
from ...store.log.segments import SegmentRef, StoredRecord, read_what_can_be
from ...store.run_store import LocalStore
from .lineage import Lineage, Reached
from .recovery_progress import RecoveryProgress

LOOK_SECONDS = 0.2
"""The shortest time between two looks at the run."""
REST = 1.0
"""The rest after some work, as a multiple of its time: training beside it has the processors for the other half."""
NICE = 19


class Follower:
    """A thread that keeps ``state`` close behind the run in ``store``, from ``__enter__`` to ``__exit__``.

    Until then ``state`` is this object's alone. Takes no lock and writes nothing.
    """

    def __init__(
        self,
        store: LocalStore,
        state: LiveState,
        after_update: Callable[[int], None] | None = None,
        rank: int = 0,
        approximate: bool = False,
    ) -> None:
        """Prepare to follow ``rank``'s log. With ``approximate`` also replay records of another kind of processor."""
        self._store, self._state, self._after_update, self._rank = store, state, after_update, rank
        self._approximate = approximate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="holdfast-follower", daemon=True)
        self._headers = _Headers()
        self._failed: CommitRef | None = None
        """A snapshot from which nothing could be replayed. The next one is waited for."""
        self._has_told = False
        self.reached: Reached | None = None
        """The point that ``state`` is at; None while it is at none."""
        self.has_begun = False
        """True once ``state`` is no longer what the script made."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the record, or the file, that is under way."""
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        with suppress(AttributeError, OSError):  # a system without priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for device in devices_of(each.parameter for each in self._state.parameters)[:1]:
            use_device(device)
        seconds = 0.0
        while not self._over.wait(max(LOOK_SECONDS, REST * seconds)):
            began = time.monotonic()
            try:
                self._look()
            except OtherArithmetic as error:
                self.reached = None
                self._tell_once(f"this standby could not take over now, since it computes otherwise. {error}")
            except (HoldfastError, OSError):  # the recovery says what is wrong, if it is still wrong then
                self.reached = None
            seconds = time.monotonic() - began

    def _tell_once(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            tell(text)

    def _look(self) -> None:
        """Bring the state as far as the run's records reach."""
        refs = self._store.line()
        if not refs or refs[0] == self._failed:
            return
        base = self._store.load(refs[0])
        line = Lineage.of(self._store, base, None, known=self._headers.of_all(self._store, base.streams))
        reached = self.reached
        if len(line.chains) > 1:
            if not line.is_as_written(self._state, self._rank):
                return  # each look would load everything
            line.leave_last()
        if reached is not None and line.reached(self._rank) == reached:
            return
        self.reached, self._failed, self.has_begun = None, refs[0], True
        line.ends_early, line.allows_approximation = self._over.is_set, self._approximate
        line.watch = RecoveryProgress(self._refuse_when_over)
        line.replay_into(self._state, self._rank, self._after_update, reached)
        self.reached, self._failed = line.reached(self._rank), None

    def _refuse_when_over(self, progress: RecoveryProgress) -> None:
        """Raise ``_Over`` between two files of a snapshot that need not be loaded any more."""
        if self._over.is_set() and not progress.replayed_records and progress.reached is None:
            raise _Over


class _Headers:
    """The headers of logs that are read again and again while they grow. Only new ones are read."""

    def __init__(self) -> None:
        self._before: dict[SegmentRef, list[StoredRecord]] = {}
        self._now: dict[SegmentRef, list[StoredRecord]] = {}

    def of_all(self, store: LocalStore, streams: Iterable[str]) -> dict[str, Journal]:
        """Return the headers of ``streams``. Segments that are gone are forgotten."""
        self._before, self._now = self._now, {}
        return {stream: read_journal(store, stream, read=self._read) for stream in streams}

    def _read(self, disk: AnyDisk, ref: SegmentRef) -> tuple[list[StoredRecord], Damaged | DiskFailed | None]:
        """Return as ``read_what_can_be`` does."""
        known = self._before.get(ref, [])
        new, error = read_what_can_be(disk, ref, known[-1].end if known else 0)
        self._now[ref] = [*known, *new]
        return self._now[ref], error


class _Over(HoldfastError):
    """The standby takes over."""
