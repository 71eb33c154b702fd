"""The server of one rank's replica: it holds what that rank stores, where several ranks train.

It does a step once all ranks have handed the step over. When its trainer dies, the remaining steps are kept as log
records behind the state. So all replicas of the run can be brought to one step, and they make a snapshot of that step.
The first rank's replica holds the run's lock and publishes what all have written.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ...distributed import Ranks, stream_of
from ...errors import HoldfastError
from ...store.format.manifest import Timeline
from ...store.log.journal import Record
from ...store.run_store import LocalStore
from ..log.log_records import clip_as_recorded
from . import retained_state, shared_memory
from .channel import Channel, Message
from .replica_liveness import HERE, KEPT, ReplicaNotes
from .replica_process import LAST_WORD, ReplicaConfig
from .replica_server import ReplicaServer

HERE_SECONDS, WORK_SECONDS = 10.0, 600.0
"""The longest times that a replica without trainer waits for a sign of the others, and for their work."""
ASKED_SECONDS, SHARE_SECONDS = 2.0, 20.0
"""The same times while another trainer waits, the second one for the other ranks' shares of a snapshot."""


class MultiRankReplicaServer(ReplicaServer):
    """A server for the trainer of one rank."""

    def __init__(self, channel: Channel, terms: ReplicaConfig) -> None:
        self._ranks = Ranks(terms.rank, terms.world_size, "that of the trainers")
        super().__init__(channel, terms)
        self._prefix = self._ranks.prefix
        self._waiting: deque[Message] = deque()
        self._all_have = -1
        self._number = self._ended = 0
        """The numbers of the snapshot begun last, and of the snapshot known to have ended."""
        self._shared = False
        """True while snapshot ``_number`` waits for the shares of other ranks."""
        self._cut = ""

    def _look(self) -> LocalStore:
        store = super()._look()
        store.is_mine = self._ranks.is_mine
        return store

    def _enter(self) -> None:
        """Acquire the run's lock on the first rank. The other ranks join once a timeline is open."""
        if self._ranks.rank == 0:
            super()._enter()

    def _begin(self, about: dict[str, Any]) -> None:
        if self._ranks.rank == 0:
            super()._begin(about)
            self._say(begun=asdict(self._store.opened))
        else:
            self._store.join(Timeline(**about["join"]), self._ranks.rank)
            self._run = [self._store.opened.id, self._store.opened.key]
            self._say_owner()

    # Messages of the trainer

    def _do(self, message: Message) -> None:
        about = message.about
        if "all_have" in about:
            self._all_have = max(self._all_have, about["all_have"])
            if "ended" in about:
                self._ended = about["ended"]
                self._end_base(about["published"])
        elif "publish" in about:
            self._publish_shares(about["publish"])
        elif "begin" in about or "close" in about:
            super()._do(message)
        else:
            self._waiting.append(message)
        self._go_on()

    def _go_on(self) -> None:
        """Process the waiting messages that may be processed now."""
        while self._waiting and self._may_do(self._waiting[0].about):
            super()._do(self._waiting.popleft())

    def _may_do(self, about: dict[str, Any]) -> bool:
        """Return whether a message may be processed: its step is on all ranks, or it has no effect.

        After drift the other ranks are not told that this one has the step, so messages are only skipped.
        """
        passes = "compare" in about or "is_equal" in about or (not self._equal and "sync" not in about)
        return passes or about["step"] <= self._all_have

    def _take_over(self, about: dict[str, Any]) -> None:
        super()._take_over(about)
        self._cut = about["cut"]
        if "begin" in about:  # counted from the beginning of a timeline, which a rollback opens too
            self._all_have, self._number, self._ended = -1, 0, 0

    def _compare(self, about: dict[str, Any]) -> None:
        if not about["last"]:
            super()._compare(about)
        else:
            self._begin_numbered(about, super()._compare)

    def _make_base(self, about: dict[str, Any]) -> None:
        self._begin_numbered(about, super()._make_base)

    def _begin_numbered(self, about: dict[str, Any], begin: Callable[[dict[str, Any]], None]) -> None:
        """Begin the snapshot that ``about`` names by ``begin``, or have all ranks give it up."""
        if about["base"] <= self._ended:  # another rank has given it up
            return
        self._number = about["base"]
        begin(about)
        if not self._equal:
            self._say(lost=self._number)

    # Snapshots

    @property
    def _base_under_way(self) -> bool:
        """Return whether this rank's share of a snapshot is still to be written."""
        return super()._base_under_way and not self._shared

    def _publish(self) -> None:
        """Write this rank's share, and have the trainer report it to the other ranks."""
        assert self._bases is not None
        ref = self._bases.share(self._base_progress).ref
        self._shared = True
        self._say(share=[self._number, ref])

    def _publish_shares(self, refs: list[dict[str, Any]]) -> None:
        """Publish the shares that all ranks have written. Called on the first rank."""
        self._store.certified_step = self._base_progress.get("certified")
        manifest = self._store.publish_shares({stream_of(rank): ref for rank, ref in enumerate(refs)})
        self._store.prune_journal()
        self._events.emit("base", step=manifest.step, durable_step=manifest.step)
        self._say(word="published")

    def _end_base(self, step: int | None) -> None:
        """End the snapshot begun last: it is a commit of ``step`` now, or with None was given up."""
        assert self._bases is not None
        if step is None:
            self._drop_base()
        else:
            if self._ranks.rank:
                self._store.follow()
            self._bases.published()
            self._base_step = step
            retained_state.drop(self._place)
        self._shared = False

    # Shutdown

    def _finish(self) -> None:
        """End after the trainer has closed, when everything is durable, or has died.

        If it died, keep what was handed over, and make a snapshot of it together with the other replicas.
        """
        self._drop_base()
        if self._closing:
            self._say(word=LAST_WORD)
        elif self._begun and self._equal:
            assert self._door is not None
            notes = ReplicaNotes(self._store.disk, self._run[0], self._ranks, self._door.has_client)
            with suppress(HoldfastError, OSError):  # memory may have room where the disk has none
                notes.leave(HERE)
            records = self._held_back()
            self._keep()
            notes.leave(KEPT, [self._step, records[-1].step if records else self._step])
            shared = False
            try:
                shared = self._persist(notes)
            finally:
                if not shared:
                    notes.give_up()

    def _persist(self, notes: ReplicaNotes) -> bool:
        """Make a snapshot of the newest step that all replicas have, if all are there.

        Returns whether this replica has written its share.
        """
        if notes.of_all(HERE, HERE_SECONDS, ASKED_SECONDS) is None:
            return False
        ranges = notes.of_all(KEPT, WORK_SECONDS, ASKED_SECONDS)
        if ranges is None:
            return False
        last = min(last for _, last in ranges)
        if last < max(retained_state.newest(self._store, None) + 1, *(first for first, _ in ranges)):
            return False
        self._all_have = last
        self._go_on()
        if not self._equal or self._step != last:
            return False
        self._drop_base()
        if self._ranks.rank:
            self._store.follow()  # its files may be in a commit that is not known yet
        assert self._bases is not None and self._state is not None
        self._bases.begin()
        while not self._bases.all_staged:
            self._bases.write_next(last)
        notes.leave("share", self._bases.share({**self._progress, "values": self._state.values()}).ref)
        if self._ranks.rank == 0 and (refs := notes.of_all("share", WORK_SECONDS, SHARE_SECONDS)) is not None:
            self._publish_shares(refs)
            self._base_step = last
        return True

    def _take_step_late(self, message: Message) -> None:
        self._waiting.append(message)

    def _put_aside(self, progress: dict[str, Any]) -> None:
        assert self._state is not None
        records = self._held_back()
        retained_state.keep(self._place, self._state, self._step, progress, self._run, self._cut, records)

    def _held_back(self) -> list[Record]:
        """Return records of the steps that some rank may not have."""
        records = []
        for message in self._waiting:
            if "sync" in message.about:  # a state that not all ranks have
                break
            if "about" in message.about:
                record, parts = message.about["about"], self._parts_of(message)
                clip_as_recorded(record, parts)
                records.append(Record(message.about["step"], record, tuple(parts)))
        return records

    def _linger(self) -> None:
        """Wait for another trainer. If none comes, remove what no trainer can use any more."""
        assert self._door is not None
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        with suppress(SystemExit, HoldfastError):
            came = self._door.has_client(self._terms.linger_seconds)
            if not came and retained_state.newest_of([self._place], self._store) <= retained_state.newest(
                self._store, None
            ):
                shared_memory.remove(self._place)
            if self._door.has_client():
                return self._door.leave()
        self._leave_place(False)
