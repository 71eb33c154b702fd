"""Snapshots of several ranks, each of which writes its share. The first rank begins and publishes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...distributed import Ranks, stream_of
from ...store.format.manifest import RankShare
from ...store.run_store import LocalStore
from ..coordinator import RankCoordinator
from ..rank_consistency import RankConsistency
from ..storage_share import StorageShare
from .snapshot_writer import SnapshotWriter


class CollectiveSnapshot:
    """The parts of ``SnapshotScheduler`` that differ with several ranks. ``emit`` writes an event."""

    def __init__(self, ranks: Ranks, store: LocalStore, emit: Callable[..., None]) -> None:
        self._ranks, self._store, self._emit = ranks, store, emit
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

    def see_published(self, bases: SnapshotWriter) -> int | None:
        """Return the step of the snapshot under way if the first rank has published it; otherwise None."""
        assert self.agreement is not None
        if not (bases.under_way and self.agreement.standing.published >= self._number > 0):
            return None
        bases.published()
        return self._store.line()[0].step

    def share(self, share: RankShare) -> None:
        """Report that this rank's share of the snapshot under way is durable."""
        assert self.agreement is not None
        self.agreement.share(self._number, share.step, share.ref)
        self.sharing = False

    def nothing_else(self) -> None:
        """Prevent the publication of earlier snapshots, and make those published known to all ranks.

        Files written for other snapshots may be overwritten afterwards. Collective: every rank must call this.
        """
        assert self.agreement is not None
        self._ranks.first_does(self.agreement.end_bases)
        if self._ranks.rank:
            self._store.follow()

    def publish_at_once(self, bases: SnapshotWriter, share: Callable[[], RankShare]) -> None:
        """Publish a snapshot that all ranks have made at the same step. Called after ``nothing_else``.

        Collective: every rank must call this.
        """
        refs = self._ranks.all_do(lambda: share().ref)
        self._ranks.first_does(lambda: self.publish_shares(refs))
        if self._ranks.rank:
            self._store.follow()
        bases.published()

    def publish_shares(self, refs: list[dict[str, Any]]) -> None:
        """Publish the shares of all ranks as a commit. Called on the first rank."""
        assert self.agreement is not None
        manifest = self._store.publish_shares({stream_of(rank): ref for rank, ref in enumerate(refs)})
        self._store.prune_journal()
        self._emit("base", step=manifest.step, durable_step=self.agreement.standing.durable_step)
