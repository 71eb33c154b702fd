"""What a replica kept becomes a base as it is, once, unless somebody comes for it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from checkpoint.loops import make, same
from holdfast.checkpoint.recovery.run_recovery import recover
from holdfast.checkpoint.replica import retained_state
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpoint.user_state import NoScriptState
from holdfast.checkpointer import Checkpointer
from holdfast.distributed import Ranks
from holdfast.errors import ChunkCorrupt
from holdfast.state.live_state import LiveState
from holdfast.store.commit.retention import Keep
from holdfast.store.run_store import LocalStore

ADAMW = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture
def left(tmp_path, monkeypatch):
    """A run with step 0 on the disk, the place where step 5 of it is kept, and the loop that was there."""
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 100)
    loop = make(ADAMW, "batchnorm")
    with Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers) as checkpointer:
        checkpointer.resume()
    for i in range(5):
        loop.iteration(i, lambda: None)
    with LocalStore.open(tmp_path / "run", keep=Keep(2), direct=False) as store:
        first = store.timelines()[0][1]
        store.begin(retained_state.ForkPoint(0, first.id, first.key))
        state, place = LiveState(loop.model, loop.optimizers), tmp_path / "kept"
        run = [store.opened.id, store.opened.key]
        retained_state.keep(place, state, 5, {"values": state.values(), "groups": []}, run)
        yield store, place, loop


def persist(store, place, stop=lambda: False):
    return retained_state.persist(place, store, lambda: None, stop)


def test_what_was_kept_is_a_base_of_the_same_bits_and_goes(left):
    store, place, loop = left
    assert persist(store, place) == 5
    other = make(ADAMW, "batchnorm")
    found = recover(store, LiveState(other.model, other.optimizers), NoScriptState(), ranks=Ranks())
    assert found.point.step == 5 and not found.problems
    assert same(other.state()["model"], loop.state()["model"])
    assert same(other.state()["slots"], loop.state()["slots"])
    assert retained_state.look(place, store) == []
    assert "run" not in store.load(store.line()[0]).progress


def test_what_somebody_comes_for_meanwhile_stays_kept(left):
    store, place, _ = left
    answers = iter([False, False, True])
    assert persist(store, place, lambda: next(answers)) is None
    assert [ref.step for ref in store.commits()] == [0]
    assert [each.last for each in retained_state.look(place, store)] == [5]


def test_what_the_disk_has_is_not_written_again(left):
    store, place, loop = left
    persist(store, place)
    state = LiveState(loop.model, loop.optimizers)
    retained_state.keep(place, state, 5, {"values": state.values()}, [store.opened.id, store.opened.key])
    before = store.timeline
    assert persist(store, place) is None
    assert store.timeline == before


def test_what_is_damaged_becomes_no_base(left):
    store, place, _ = left
    for file in (place / retained_state.KEPT / "data").iterdir():
        data = bytearray(file.read_bytes())
        if any(data):
            data[-100] ^= 1
            file.write_bytes(data)
    with pytest.raises(ChunkCorrupt):
        persist(store, place)
    assert [ref.step for ref in store.commits()] == [0]


def test_run_without_a_commit_can_begin_again(tmp_path):
    """A trainer was killed while its first step was written, and so was the next one."""
    loop, place = make(ADAMW, "batchnorm"), tmp_path / "kept"
    with LocalStore.open(tmp_path / "run", keep=Keep(2), direct=False) as store:
        store.begin(None)
        state = LiveState(loop.model, loop.optimizers)
        run = [store.opened.id, store.opened.key]
        retained_state.keep(place, state, 0, {"values": state.values(), "groups": []}, run)
        answers = iter([False, True])
        assert persist(store, place, lambda: next(answers)) is None
        assert not place.exists()
    with LocalStore.open(tmp_path / "run", keep=Keep(2), direct=False) as store:
        assert store.commits() == []
