"""What ranks see together before the first step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import nn

from holdfast.checkpoint.rank_consistency import seen_together
from holdfast.state.live_state import LiveState


class Played:
    """One of several ranks, each a thread."""

    alone = False

    def __init__(self, rank, barrier, told):
        self.rank, self._barrier, self._told = rank, barrier, told

    def all_do(self, what):
        self._told[self.rank] = what()
        self._barrier.wait(60)
        found = list(self._told)
        self._barrier.wait(60)
        return found


def stage(number):
    """Of the second stage two parameters are one memory, and others lie between them by size."""
    model = nn.Module()
    if number == 0:
        model.first = nn.Parameter(torch.zeros(64))
        return model
    flat = torch.zeros(96)
    model.one, model.two = nn.Parameter(flat[:64]), nn.Parameter(flat[32:])
    model.more = nn.Parameter(torch.zeros(64))
    return model


def test_parameters_of_one_memory_are_stored_by_one_rank_of_any_stage():
    barrier, told = Barrier(3), [None] * 3

    def see(rank):
        model = stage(0 if rank == 0 else 1)
        optimizer = torch.optim.AdamW(model.parameters())
        return seen_together(Played(rank, barrier, told), lambda: LiveState(model, [optimizer]))

    with ThreadPoolExecutor(3) as threads:
        stored = [{p.name for p in state.stored} for state in threads.map(see, range(3))]
    assert sorted(name for names in stored for name in names) == ["first", "more", "one", "two"]
    assert any({"one", "two"} <= names for names in stored)
