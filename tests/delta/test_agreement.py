"""What a rank tells the others, and what it does on their word."""

from __future__ import annotations

import time
from types import SimpleNamespace

from holdfast.delta.agreement import Agreement
from holdfast.delta.together import Together
from holdfast.ranks import Ranks


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

    agreement = Agreement(
        Ranks(1, 2, object()), how_far=lambda: 0, steps_done=lambda: 0,
        publish=lambda refs: None, follow=follow, deadline_seconds=5,
    )  # fmt: skip
    board["published"] = "1"
    end = time.monotonic() + 5
    while not board["failed"] and time.monotonic() < end:
        time.sleep(0.01)
    agreement.close(orderly=False)
    assert board["failed"] == "rank 1 failed: OSError: the directory is gone"


def test_no_base_is_begun_before_the_share_of_the_one_before_is_told():
    told, given_up = [], []
    agreement = SimpleNamespace(
        standing=SimpleNamespace(base_wanted=1, published=0), share=lambda number, *_: told.append(number)
    )
    bases = SimpleNamespace(under_way=False, give_up=lambda: given_up.append(1))
    together = Together(Ranks(1, 2, object()), None, lambda *_, **__: None)
    together.agreement = agreement
    assert together.is_due(False, bases)
    together.sharing = True
    agreement.standing.base_wanted = 3
    assert not together.is_due(False, bases) and len(given_up) == 1
    together.share(SimpleNamespace(step=5, ref={}))
    assert told == [1]
    assert together.is_due(False, bases) and len(given_up) == 2
