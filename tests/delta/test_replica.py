"""A replica holds what the trainer holds, bit for bit, after every step; where it does not, that is found and told."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from delta.loops import make, same
from delta.test_replay import OPTIMIZERS, recovered
from holdfast.checkpointer import Checkpointer
from holdfast.delta import bases, host, replica, tier
from holdfast.errors import BadInput, ReplicaDied, RunLocked
from holdfast.events import read_events
from replica_run import Forked

STEPS = 9
ADAMW = partial(torch.optim.AdamW, lr=0.01)
HABITS = (
    "", "schedule", "groups", "clip", "clip_norm", "scaler", "accumulate", "unused", "tied", "frozen", "batchnorm",
    "two",
)  # fmt: skip


@pytest.fixture(autouse=True)
def forked(monkeypatch, tmp_path):
    """Replicas are forked, and none is left: neither a process nor anything in its place."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(replica, "start_process", Forked)
    monkeypatch.setattr(tier, "MEMORY", memory)
    monkeypatch.setattr(bases, "UNIT_BYTES", 100)
    yield
    assert os.listdir(memory) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def start(root, feature="batchnorm", optimizer=ADAMW, **options):
    loop = make(optimizer, "" if feature == "clip_norm" else feature)
    if feature == "clip_norm":
        options["clip_norm"] = 0.1
    checkpointer = Checkpointer(
        root / "run", model=loop.model, optimizer=loop.optimizers, replica=True, **loop.things, **options
    )
    return loop, checkpointer


def events(root, name):
    return [event for event in read_events(root / "run" / "events.jsonl") if event["event"] == name]


def states_of(feature, optimizer=ADAMW, steps=STEPS):
    """Of a loop that has no checkpointer, by the number of calls of ``step`` that count."""
    loop = make(optimizer, "clip" if feature == "clip_norm" else feature)
    states = [loop.state()]
    for i in range(steps):
        loop.iteration(i, lambda: None)
        states.append(loop.state())
    return states


@pytest.mark.parametrize("feature", HABITS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_replica_is_the_trainer_after_every_step(tmp_path, name, feature):
    """Each step is compared in full by digest, and what the replica persisted of it is read back."""
    loop, checkpointer = start(tmp_path, feature, OPTIMIZERS[name], retain=99)
    with checkpointer:
        checkpointer.resume()
        states = [loop.state()]
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
            states.append(loop.state())
        assert checkpointer.durable_step == STEPS
    assert not events(tmp_path, "drift")
    for step, (found, expected) in enumerate(zip(states, states_of(feature, OPTIMIZERS[name]), strict=True)):
        assert same(found["model"], expected["model"]) and same(found["slots"], expected["slots"]), step
        plain = "" if feature == "clip_norm" else feature
        assert same(recovered(tmp_path / "run", OPTIMIZERS[name], plain, step), found), step
