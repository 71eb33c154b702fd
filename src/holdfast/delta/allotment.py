"""Allotment: what one of several ranks may take of the disk, such that together they keep within the storage cap.

Each rank counts its own files and its own journal; the first one also all that belongs to nobody. What the ranks may
take adds up to the cap, so nobody asks anybody before it writes. A rank that has little left calls all ranks to a base
of one step, after which older records go. Whenever all make a base at once it is divided anew, by what each holds, and
older bases go as far as they have to. Sizes are bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from ..errors import DoesNotFit
from ..plan.cadence import STORAGE_FULLS
from ..ranks import Ranks
from ..store.local import LocalStore
from ..units import PAGE, GiB, format_bytes
from .recorder import Recorder

LEAST_STORAGE = GiB
"""The default cap where the state is small, and headers are most of a record."""

RECORDS_AHEAD = 5
"""A rank that has no room for so many more calls the others: the base that makes room comes a step or two later, and
sometimes takes a second one."""

BESIDE_STATE = 64 * 1024
"""What a rank has to store whatever it holds: headers, filler, the index."""


class Part(NamedTuple):
    """Of one rank."""

    used: int
    holds: int
    needs: int
    cap: int


def left_bytes(store: LocalStore, recorder: Recorder) -> int:
    """What may still be written. While the recorder's thread gets on, no more than that."""
    assert store.cap_bytes is not None
    # before the rest: what is written meanwhile counts twice, and not never
    pending = recorder.pending_bytes + recorder.pending * recorder.header_bytes
    free = recorder.segment_free_bytes
    return store.cap_bytes - (store.used_bytes - free + pending)


class Allotment:
    """Of this rank. ``told`` is the cap of the whole run, None for the default; ``holds`` says how many bytes of state
    the rank stores; ``call`` calls all ranks to a base of one step."""

    def __init__(
        self,
        ranks: Ranks,
        store: LocalStore,
        recorder: Recorder,
        told: int | None,
        holds: Callable[[], int],
        call: Callable[[], None],
    ) -> None:
        self._ranks, self._store, self._recorder = ranks, store, recorder
        self._told, self._holds, self._call = told, holds, call
        self._record_bytes = self._full_bytes = 0
        store.retires_for_room = False  # only where all do so together

    def default(self, full_bytes: int) -> None:
        """A base of this rank takes ``full_bytes``."""
        self._full_bytes = full_bytes
        if self._told is None:
            least = LEAST_STORAGE // self._ranks.world_size
            self._store.cap_bytes = max(STORAGE_FULLS * full_bytes, least) + self._store.for_good_bytes

    def divide(self) -> None:
        """Find what each may take. Called on all, where nothing waits to be written and no base is under way."""
        store = self._store
        while True:
            used, holds = self._recorder.do(store.measure), self._holds() + BESIDE_STATE
            self.default(max(self._full_bytes, store.newest_bytes, holds))
            parts = self._ranks.everyone(Part(used, holds, self._ahead, store.cap_bytes or 0))
            if self._told is not None:
                room, all_hold = self._told - sum(part.used for part in parts), sum(p.holds for p in parts)
                parts = [part._replace(cap=part.used + room * part.holds // all_hold) for part in parts]
                store.cap_bytes, store.cap_share = parts[self._ranks.rank].cap, holds / all_hold
            if all(part.used + part.needs <= part.cap for part in parts) or not self._drop_one():
                break
        if self._told is not None and any(part.used > part.cap for part in parts):
            self._refuse(sum(part.used for part in parts))

    def fits(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` may be written. The others are called where few more may."""
        self._record_bytes = nbytes
        if self._is_low():
            self._recorder.do(self._store.measure)  # the first rank may have removed some
            if self._is_low():
                self._call()
        return self._left >= nbytes

    def is_low_anywhere(self) -> bool:
        """Called on all."""
        return any(self._ranks.everyone(self._is_low()))

    def _is_low(self) -> bool:
        return self._left < self._ahead

    @property
    def _left(self) -> int:
        """Besides what may be left over at the ends of segments."""
        if self._store.cap_bytes is None:
            return sys.maxsize
        return left_bytes(self._store, self._recorder) - 2 * self._recorder.group * self._record_bytes

    @property
    def _ahead(self) -> int:
        """What there has to be room for, lest the others are called: records, and files where more bases are kept."""
        return RECORDS_AHEAD * (self._record_bytes or PAGE) + self._full_bytes * self._store.may_grow

    def _drop_one(self) -> bool:
        """Retire the oldest base that may go; whether there was one. Called on all."""
        gone = self._ranks.first_does(self._store.drop_oldest)
        if self._ranks.rank:
            self._store.follow()
        return gone is not None

    def _refuse(self, used: int) -> None:
        raise DoesNotFit(
            f"storage = {format_bytes(self._told or 0)} is too little: {self._store.root} takes {format_bytes(used)},"
            f" and the newest two bases with their records stay. Give at least {used + used // 2} bytes."
        )
