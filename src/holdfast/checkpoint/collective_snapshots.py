"""Snapshots of several ranks, and the share of the storage cap that each rank may use.

Each rank writes its share of a snapshot; the first rank begins snapshots and publishes them once all shares are
durable. Each rank counts its own files and its own log; the first rank also counts files that belong to no rank. The
shares of the cap add up to the cap, so no rank has to ask another before it writes. A rank with little space left calls
all ranks to a snapshot of one step, after which older records are dropped. Then the cap is divided again by the bytes
that each rank holds, and older snapshots are dropped as far as necessary. Called by ``SnapshotScheduler``. Sizes are
bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..distributed import Ranks, stream_of
from ..errors import DoesNotFit
from ..quantities import PAGE, GiB, format_bytes
from ..schedule.interval.snapshot_interval import STORAGE_FULLS
from ..store.format.manifest import CommitRef, RankShare
from ..store.run_store import LocalStore
from .coordinator import RankCoordinator
from .log.recorder import Recorder
from .nodes.node_run import NodeRun
from .rank_consistency import RankConsistency
from .snapshot.snapshot_writer import SnapshotWriter

T = TypeVar("T")
LEAST_STORAGE = GiB
"""The default cap for a small state, where headers are most of a record."""
RECORDS_AHEAD = 5
"""A rank with room for fewer records than this calls the others to a snapshot.

That snapshot comes a step or two later, and sometimes a second one is needed.
"""
BESIDE_STATE = 64 * 1024
"""The bytes that a rank stores whatever it holds: headers, filler, the index."""


class CollectiveSnapshot:
    """The parts of ``SnapshotScheduler`` that differ with several ranks.

    ``emit`` writes an event. ``nodes`` is there where the nodes share no directory.
    """

    def __init__(
        self, ranks: Ranks, store: LocalStore, emit: Callable[..., None], nodes: NodeRun | None = None
    ) -> None:
        self._ranks, self._store, self._emit, self._nodes = ranks, store, emit, nodes
        self.agreement: RankCoordinator | None = None
        self.room: StorageShare
        self.alike = RankConsistency(ranks, emit)
        self._number = 0
        self.sharing = False
        """True while the share of the snapshot under way waits for the records before it."""

    def call(self) -> None:
        """Have all ranks make a snapshot at once, as soon as they can."""
        assert self.agreement is not None
        self.agreement.call()

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank, which speaks for all."""
        return self._ranks.rank == 0

    def decide(self, what: Callable[[], T]) -> T:
        """Return what the first rank finds by ``what``. Collective: every rank must call this."""
        return self._ranks.first_does(what)

    def is_due(self, due: bool, bases: SnapshotWriter) -> bool:
        """Return whether this rank is to begin a snapshot.

        The first rank begins one when it is ``due`` there. The others follow when they learn of it.
        """
        assert self.agreement is not None
        if self._ranks.rank == 0:
            if due:
                self._number = self.agreement.begin_base()
            return due
        wanted = self.agreement.standing.base_wanted
        if wanted <= self._number or self.sharing:
            return False
        self._number = wanted
        bases.give_up()
        return True

    def begin_alike(self, bases: SnapshotWriter) -> bool:
        """Return whether all ranks begin a snapshot of the current step now.

        They do not while the first rank has not published the one before, or a share of it still waits to be written.
        Collective: every rank must call this.
        """
        assert self.agreement is not None
        if not self.all_are(not self.sharing and (self._ranks.rank > 0 or not bases.under_way)):
            return False
        number = self._ranks.first_does(self.agreement.begin_base)
        if (
            self._ranks.rank
        ):  # before files are written: the one before may be published, which was not heard yet
            self.follow()
        self._number = number
        bases.give_up()
        return True

    def all_are(self, ready: bool) -> bool:
        """Return whether all ranks are ``ready``. Collective: every rank must call this."""
        return all(self._ranks.everyone(ready))

    def see_published(self, bases: SnapshotWriter) -> int | None:
        """Return the step of the snapshot under way if the first rank has published it; otherwise None."""
        assert self.agreement is not None
        if not (bases.under_way and self.agreement.standing.published >= self._number > 0):
            return None
        bases.published()
        return self._store.line()[0].step

    def share(self, share: RankShare) -> None:
        """Report that this rank's share of the snapshot under way is durable, with ``nodes`` also at the partner."""
        number = self._number

        def report() -> None:
            assert self.agreement is not None
            self.agreement.share(number, share.step, share.ref)
            self.sharing = False

        if self._nodes is None:
            report()
        else:
            self._nodes.send(share, report)

    def nothing_else(self) -> None:
        """Prevent the publication of earlier snapshots, and make those published known to all ranks.

        Files written for other snapshots may be overwritten afterwards. An error on one rank is one on all. Collective:
        every rank must call this.
        """
        assert self.agreement is not None
        self._ranks.first_does(self.agreement.end_bases)

        def follow() -> None:
            if self._nodes is not None:
                self._nodes.give_up_sending()
                self.sharing = False
            if self._ranks.rank:
                self.follow()

        self._ranks.all_do(follow)

    def publish_at_once(self, bases: SnapshotWriter, share: Callable[[], RankShare]) -> None:
        """Publish a snapshot that all ranks have made at the same step. Called after ``nothing_else``.

        Collective: every rank must call this.
        """
        refs = self._ranks.all_do(lambda: self._made(share).ref)
        self._ranks.first_does(lambda: self.publish_shares(refs))
        if self._ranks.rank:
            self.follow()
        bases.published()

    def _made(self, share: Callable[[], RankShare]) -> RankShare:
        made = share()
        if self._nodes is not None:
            self._nodes.copy_share(made)
        return made

    def follow(self) -> None:
        """Take over what the first rank has published. Called on the other ranks."""
        if self._nodes is None:
            self._store.follow()
        else:
            self._nodes.follow()

    def publish_shares(self, refs: list[dict[str, Any]]) -> None:
        """Publish the shares of all ranks as a commit. Called on the first rank."""
        assert self.agreement is not None
        by_stream = {stream_of(rank): ref for rank, ref in enumerate(refs)}
        if self._nodes is None:
            manifest = self._store.publish_shares(by_stream)
            self._store.prune_journal()
        else:
            manifest = self._nodes.publish(by_stream)
        self._emit("base", step=manifest.step, durable_step=self.agreement.standing.durable_step)


class StorageShare:
    """The storage share of this rank.

    Args:
        told: The cap of the whole run, in bytes; None for the default.
        holds: Returns how many bytes of state the rank stores.
        call: Calls all ranks to a snapshot of one step.
        nodes: The run on several nodes, where they share no directory.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: LocalStore,
        recorder: Recorder,
        told: int | None,
        holds: Callable[[], int],
        call: Callable[[], None],
        nodes: NodeRun | None = None,
    ) -> None:
        self._ranks, self._store, self._recorder, self._nodes = ranks, store, recorder, nodes
        # with a second copy of every share at a partner, half of the cap is for the shares themselves
        self._copies = 1 if nodes is None else 2
        self._told = None if told is None else told // self._copies
        self._holds, self._call = holds, call
        self._record_bytes = self._full_bytes = self._frozen_bytes = 0
        store.retires_for_room = False  # all ranks have to do so together

    def default(self, full_bytes: int, frozen_bytes: int) -> None:
        """Set the default cap.

        Args:
            full_bytes: The bytes of this rank's share that every snapshot writes.
            frozen_bytes: The bytes of frozen parameters in it.
        """
        self._full_bytes, self._frozen_bytes = full_bytes, frozen_bytes
        if self._told is None:
            least = LEAST_STORAGE // self._ranks.world_size
            self._store.cap_bytes = (
                max(STORAGE_FULLS * (full_bytes + frozen_bytes), least) + self._store.for_good_bytes
            )

    def divide(self) -> None:
        """Compute the share of each rank.

        Collective: every rank must call this, with nothing waiting to be written and no snapshot under way. Raises
        ``DoesNotFit`` if the cap is too small.
        """
        store = self._store
        while True:
            used, holds = self._recorder.do(store.measure), self._holds() + BESIDE_STATE
            frozen = self._frozen_bytes
            self.default(max(self._full_bytes, max(store.newest_bytes, holds) - frozen), frozen)
            parts = self._ranks.everyone(StoragePart(used, holds, self._ahead, store.cap_bytes or 0))
            if self._told is not None:
                room, all_hold = self._told - sum(part.used for part in parts), sum(p.holds for p in parts)
                parts = [part._replace(cap=part.used + room * part.holds // all_hold) for part in parts]
                store.cap_bytes = parts[self._ranks.rank].cap
                store.cap_share = holds / all_hold / self._copies
            if all(part.used + part.needs <= part.cap for part in parts) or not self._drop_one():
                break
        if self._told is not None and any(part.used > part.cap for part in parts):
            self._refuse(sum(part.used for part in parts))

    def fits(self, nbytes: int) -> bool:
        """Return whether a record of ``nbytes`` may be written. Calls the other ranks when space is low."""
        self._record_bytes = nbytes
        if self._is_low():
            self._recorder.do(self._store.measure)  # the first rank may have removed segments
            if self._is_low():
                self._call()
        return self._left >= nbytes

    def is_low_anywhere(self) -> bool:
        """Return whether any rank is low on space. Collective: every rank must call this."""
        return any(self._ranks.everyone(self._is_low()))

    def _is_low(self) -> bool:
        return self._left < self._ahead

    @property
    def _left(self) -> int:
        """The bytes left, less what the ends of segments may waste."""
        if self._store.cap_bytes is None:
            return sys.maxsize
        return self._recorder.left_bytes(self._store) - 2 * self._recorder.group * self._record_bytes

    @property
    def _ahead(self) -> int:
        """The bytes below which the others are called: some records, and files if more snapshots are retained."""
        return RECORDS_AHEAD * (self._record_bytes or PAGE) + self._full_bytes * self._store.may_grow

    def _drop_one(self) -> bool:
        """Retire the oldest snapshot that may go, and return whether there was one.

        Collective: every rank must call this.
        """
        gone, is_commit = self._ranks.first_does(self._dropped)
        if self._nodes is not None:
            self._nodes.drop(gone if is_commit else None)
        elif self._ranks.rank:
            self._store.follow()
        return gone is not None

    def _dropped(self) -> tuple[CommitRef | None, bool]:
        """Retire the oldest, and return it with whether it was a commit: a copy of weights has a commit's name."""
        gone = self._store.drop_oldest()
        return gone, gone is not None and not self._store.retains(gone)

    def _refuse(self, used: int) -> None:
        told, used = (self._told or 0) * self._copies, used * self._copies
        copies = " with the copies at partners" * (self._copies > 1)
        raise DoesNotFit(
            f"storage = {format_bytes(told)} is too little: {self._store.root} takes {format_bytes(used)}{copies},"
            f" and the newest two bases with their records stay. Give at least {used + used // 2} bytes."
        )


class StoragePart(NamedTuple):
    """The storage of one rank, in bytes."""

    used: int
    holds: int
    needs: int
    cap: int
