"""Ranks whose nodes have a directory each, and with other ways to keep steps and to end."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from dist.world import ended
from holdfast.checkpoint.collective_snapshots import CollectiveSnapshot
from holdfast.checkpoint.recording import LogBackend
from holdfast.distributed import Ranks

NODES = [0, 1]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("lost", NODES)
def test_ranks_choose_together_after_a_node_was_lost(world, tmp_path, lost):
    """The new node has no base of its own, and the others know what an earlier process has measured."""
    whole = ended(world.run_undisturbed(2, kind="ddp", steps=50))
    options = {"kind": "ddp", "root": tmp_path / "run", "nodes": NODES, "every": "auto", "switching": True}
    cut = world.run(2, kill=["all", 37], steps=50, **options)
    assert [each["code"] for each in cut] == [-9, -9]
    shutil.rmtree(tmp_path / f"run-{lost}")
    after = ended(world.run(2, steps=50, **options))
    assert after[0]["resumed"] == after[1]["resumed"] > 0
    assert after[0]["digests"]["50"] == whole[0]["digests"]["50"]


def test_node_has_the_last_commit_before_its_files_are_written_again(monkeypatch):
    """The first rank has published, and this rank has not heard of it."""
    done = []
    ranks = Ranks()
    monkeypatch.setattr(ranks, "rank", 1)
    monkeypatch.setattr(Ranks, "everyone", lambda self, value: [value, value])
    monkeypatch.setattr(Ranks, "first_does", lambda self, what: 2)
    nodes = SimpleNamespace(follow=lambda: done.append("follow"))
    store = SimpleNamespace(follow=lambda: done.append("only this directory"))
    bases = SimpleNamespace(under_way=True, give_up=lambda: done.append("give up"))
    together = CollectiveSnapshot(ranks, store, lambda *_, **__: None, nodes)
    together.agreement = SimpleNamespace(begin_base=lambda: 2)
    assert together.begin_alike(bases)
    assert done == ["follow", "give up"]


@pytest.mark.parametrize("is_alive", [True, False])
def test_write_that_was_left_at_the_end_is_not_waited_for(is_alive):
    closed = []
    backend = LogBackend.__new__(LogBackend)
    backend.agreement = SimpleNamespace(close=lambda orderly: None, failure=None)
    backend._recorder = SimpleNamespace(is_alive=is_alive)
    backend._nodes = SimpleNamespace(close=closed.append)
    backend.part(orderly=True)
    assert closed == [not is_alive]
