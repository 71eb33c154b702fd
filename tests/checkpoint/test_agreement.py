"""What a rank tells the others, and what it does on their word."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from holdfast.checkpoint.collective_snapshots import CollectiveSnapshot
from holdfast.checkpoint.coordinator import HEARD_SECONDS, RankCoordinator
from holdfast.distributed import Ranks


class Board(dict):
    """In place of the key-value store that ranks share."""

    set = dict.__setitem__

    def multi_get(self, keys):
        return [self[key].encode() for key in keys]


def test_who_fails_in_the_background_tells_the_others(monkeypatch):
    board = Board()
    monkeypatch.setattr(Ranks, "board", lambda self, initial, seconds: board.update(initial) or board)

    def follow():
        raise OSError("the directory is gone")

    agreement = RankCoordinator(
        Ranks(1, 2, object()), how_far=lambda: 0, steps_done=lambda: 0,
        publish=lambda refs: None, follow=follow, deadline_seconds=5,
    )  # fmt: skip
    board["published"] = "1"
    end = time.monotonic() + 5
    while not board["failed"] and time.monotonic() < end:
        time.sleep(0.01)
    agreement.close(orderly=False)
    assert board["failed"] == "rank 1 failed: OSError: the directory is gone"


@pytest.mark.parametrize("how", ["in the middle of a look", "of what it hears"])
def test_who_tells_of_its_failure_promises_no_step_that_went_with_it(monkeypatch, how):
    """Others read how far it is once they have read that it failed."""

    class Told(Board):
        def set(self, key, value):
            self[key] = value
            if key == "failed":
                self["promised"] = self["own/1"]

    board = Told()
    monkeypatch.setattr(Ranks, "board", lambda self, initial, seconds: board.update(initial) or board)
    survives, fails = [7], threading.Event()

    def how_far():
        found = survives[0]
        if (
            fails.is_set() and found == 7 and how == "in the middle of a look"
        ):  # what another thread does meanwhile
            survives[0] = 3
            agreement.fail(OSError("the replica is gone"))
        return found

    def hear(standing):
        if fails.is_set() and how == "of what it hears":
            survives[0] = 3
            raise OSError("the replica is gone")

    agreement = RankCoordinator(
        Ranks(1, 2, object()), how_far=how_far, steps_done=lambda: 0, hear=hear,
        publish=lambda refs: None, follow=lambda: None, deadline_seconds=5,
    )  # fmt: skip
    fails.set()
    end = time.monotonic() + 5
    while not board["failed"] and time.monotonic() < end:
        time.sleep(0.01)
    agreement.close(orderly=False)
    assert board["failed"] == "rank 1 failed: OSError: the replica is gone"
    assert board["promised"] == "3"


@pytest.mark.slow
def test_the_first_rank_keeps_the_board_until_a_late_rank_has_seen_why_it_failed(monkeypatch):
    """However late that looks, where it is seen to be there."""

    class Leaving(Board):
        gone = False

        def multi_get(self, keys):
            if self.gone:
                raise RuntimeError("connection reset by peer")
            return super().multi_get(keys)

    board, late = Leaving(), threading.Event()
    monkeypatch.setattr(Ranks, "board", lambda self, initial, seconds: board.update(initial) or board)

    def how_far():
        if late.is_set():
            late.clear()
            time.sleep(1.0)
        return 0

    common = {
        "steps_done": lambda: 0,
        "publish": lambda refs: None,
        "follow": lambda: None,
        "deadline_seconds": 5,
    }
    first = RankCoordinator(Ranks(0, 2, object()), how_far=lambda: 0, **common)
    other = RankCoordinator(Ranks(1, 2, object()), how_far=how_far, **common)
    late.set()
    while late.is_set():
        time.sleep(0.01)
    first.fail(ValueError("a mistake"))
    first.close(orderly=False)
    board.gone = True
    while other.failure is None:
        time.sleep(0.01)
    assert "rank 0 failed: ValueError: a mistake" in str(other.failure)
    other.close(orderly=False)


def test_the_first_rank_waits_for_no_rank_that_is_gone(monkeypatch):
    board = Board()
    monkeypatch.setattr(Ranks, "board", lambda self, initial, seconds: board.update(initial) or board)
    first = RankCoordinator(
        Ranks(0, 2, object()), how_far=lambda: 0, steps_done=lambda: 0, publish=lambda refs: None, follow=lambda: None,
        is_there=lambda rank: False, deadline_seconds=5,
    )  # fmt: skip
    first.fail(ValueError("a mistake"))
    began = time.monotonic()
    first.close(orderly=False)
    assert time.monotonic() - began < HEARD_SECONDS


def test_no_base_is_begun_before_the_share_of_the_one_before_is_told():
    told, given_up = [], []
    agreement = SimpleNamespace(
        standing=SimpleNamespace(base_wanted=1, published=0), share=lambda number, *_: told.append(number)
    )
    bases = SimpleNamespace(under_way=False, give_up=lambda: given_up.append(1))
    together = CollectiveSnapshot(Ranks(1, 2, object()), None, lambda *_, **__: None)
    together.agreement = agreement
    assert together.is_due(False, bases)
    together.sharing = True
    agreement.standing.base_wanted = 3
    assert not together.is_due(False, bases) and len(given_up) == 1
    together.share(SimpleNamespace(step=5, ref={}))
    assert told == [1]
    assert together.is_due(False, bases) and len(given_up) == 2
