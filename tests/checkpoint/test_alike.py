"""What a rank digests when, and what the first one makes of it, without processes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from holdfast.checkpoint import rank_consistency
from holdfast.checkpoint.rank_consistency import RankConsistency
from holdfast.state.layout.regions import copies, owners
from holdfast.state.live_state import LiveState


class Board(dict):
    """Stands for the key-value store."""

    def set(self, key, value):
        self[key] = value


class Rank:
    def __init__(self, rank, board):
        torch.manual_seed(0)
        self.board, self.events = board, []
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.state = self.seen()
        ranks = SimpleNamespace(rank=rank, world_size=2)
        self.alike = RankConsistency(ranks, lambda event, **fields: self.events.append((event, fields)))
        self.alike.tell = board.set
        board.setdefault(f"alike/{rank}", RankConsistency.NOTHING)

    def seen(self):
        state = LiveState(self.model, [torch.optim.SGD(self.model.parameters(), lr=0.1)])
        held = {p.name: (state.boxes[p.name], p.parameter.nbytes) for p in state.parameters}
        state.copies = copies([held, held], owners([held, held]))
        return state

    def step(self, step):
        self.alike.note(self.board)
        self.alike.advance(self.state, step)


@pytest.fixture
def two(monkeypatch):
    """Two ranks that have heard that a comparison begins at some step, and what that is."""
    monkeypatch.setattr(rank_consistency, "BYTES_PER_STEP", 40)
    board = Board(RankConsistency.common)
    ranks = [Rank(rank, board) for rank in range(2)]
    ranks[0].alike.begin(ranks[0].state, 10)
    return ranks, board, json.loads(board["compare"])[1]


def test_so_many_bytes_are_digested_at_the_end_of_each_step_and_a_difference_is_told(two):
    ranks, board, at = two
    with torch.no_grad():
        ranks[1].model[1].bias[0] += 1
    count = len(list(rank_consistency._batches(ranks[0].state.copies)))
    assert at > 10 and count == 3
    for step in range(at - 2, at + count):
        for rank in ranks:
            assert rank.board[f"alike/{rank.alike._ranks.rank}"] == RankConsistency.NOTHING
            rank.step(step)
        ranks[0].alike.lead(board, board)
    [(event, told)] = ranks[0].events
    assert (event, told["step"], told["compared"]) == ("copies", at, True)
    assert told["different"].count("1.bias") == 1 and "weight" not in told["different"]
    for rank in ranks:
        with pytest.warns(UserWarning, match=r"should hold the same do not: rank \d has other 1\.bias than"):
            rank.step(at + count)
        rank.step(at + count + 1)  # and not again
        assert rank.alike.marked({"a": 1}) == {"a": 1, "copies": {"step": at, "different": told["different"]}}


@pytest.mark.parametrize("why", ["late", "changed"])
def test_where_one_could_not_compare_nothing_is_said_of_what_they_hold(two, why):
    """Who hears of it too late digests another step, and a state that changed its form is another."""
    ranks, board, at = two
    ranks[0].step(at)
    ranks[1].step(at + 1 if why == "late" else at)
    if why == "changed":
        ranks[1].state = ranks[1].seen()
    for step in range(at + 2, at + 6):
        for rank in ranks:
            rank.step(step)
    ranks[0].alike.lead(board, board)
    assert ranks[0].events == [("copies", {"step": at, "compared": False})]
    ranks[0].alike.begin(ranks[0].state, at + 6)
    assert json.loads(board["compare"])[0] == 2


def test_a_comparison_is_not_begun_while_one_is_under_way(two):
    ranks, board, at = two
    ranks[0].step(at)
    ranks[0].alike.begin(ranks[0].state, at)
    assert json.loads(board["compare"]) == [1, at]
