"""The communication hook by itself: what it keeps, and when it copies nothing."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import torch

from holdfast.checkpoint.capture import early_averages


def test_a_model_can_be_copied_and_pickled_with_its_hook():
    state = early_averages.AveragingState(object(), listener=SimpleNamespace())
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert copied.listener is None and copied.group is None


def test_a_backward_that_is_over_writes_nothing(monkeypatch):
    """Its slot may be another step's by the time that an exchange, which it left under way, ends."""
    monkeypatch.setattr(early_averages, "_at_the_end", lambda callback: None)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)
    place = torch.zeros(3)
    state = early_averages.AveragingState(
        listener=SimpleNamespace(place_of=lambda parameter, grad: place, arrived=lambda parameter: None)
    )
    bucket = SimpleNamespace(parameters=lambda: [torch.ones(3)], gradients=lambda: [torch.ones(3)])
    begun = state.handed(bucket)
    state.over()
    begun()
    assert not place.any()
    state.handed(bucket)()
    assert place.all()
