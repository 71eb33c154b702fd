"""Together: a base that several ranks make, each its share. The first rank says when, and makes it a commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ranks import Ranks, stream_of
from ..store.local import LocalStore
from ..store.manifest import Share
from .agreement import Agreement
from .alike import Alike
from .allotment import Allotment
from .bases import BaseMaker


class Together:
    """What ``Pace`` does otherwise where there are several ranks. ``emit`` writes an event."""

    def __init__(self, ranks: Ranks, store: LocalStore, emit: Callable[..., None]) -> None:
        self._ranks, self._store, self._emit = ranks, store, emit
        self.agreement: Agreement | None = None
        self.room: Allotment
        self.alike = Alike(ranks, emit)
        self._number = 0
        self.sharing = False
        """Whether the share of the base that is under way waits for the records before it."""

    def call(self) -> None:
        """Have all ranks make a base at once, as soon as they can."""
        assert self.agreement is not None
        self.agreement.call()

    def is_due(self, due: bool, bases: BaseMaker) -> bool:
        """The first rank decides, by whether one is ``due`` there; the others follow when they see it."""
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

    def see_published(self, bases: BaseMaker) -> int | None:
        """The step of the base that is under way, if the first rank has made it a commit."""
        assert self.agreement is not None
        if not (bases.under_way and self.agreement.standing.published >= self._number > 0):
            return None
        bases.published()
        return self._store.line()[0].step

    def share(self, share: Share) -> None:
        """This rank's part of the base that is under way is durable."""
        assert self.agreement is not None
        self.agreement.share(self._number, share.step, share.ref)
        self.sharing = False

    def nothing_else(self) -> None:
        """No base begun before becomes a commit any more, and all ranks know of those that did: what was written for
        others may be written over. Called on all."""
        assert self.agreement is not None
        self._ranks.first_does(self.agreement.end_bases)
        if self._ranks.rank:
            self._store.follow()

    def publish_at_once(self, bases: BaseMaker, share: Callable[[], Share]) -> None:
        """Make the base, which all ranks have at the same step, a commit. Called on all, after ``nothing_else``."""
        refs = self._ranks.all_do(lambda: share().ref)
        self._ranks.first_does(lambda: self.publish_shares(refs))
        if self._ranks.rank:
            self._store.follow()
        bases.published()

    def publish_shares(self, refs: list[dict[str, Any]]) -> None:
        """On the first rank: make a commit of what the ranks have."""
        assert self.agreement is not None
        manifest = self._store.publish_shares({stream_of(rank): ref for rank, ref in enumerate(refs)})
        self._store.prune_journal()
        self._emit("base", step=manifest.step, durable_step=self.agreement.standing.durable_step)
