"""Ranks whose nodes have a directory each: a node is lost with its directory, and the others have its share."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress

import pytest

from dist.world import ended
from holdfast.events import read_events
from holdfast.store.reader import RunReader

THREE = [0, 1, 2]


@pytest.fixture
def undisturbed(world):
    """A run of three ranks in one directory that all share."""
    return ended(world.run_undisturbed(3, kind="fsdp", steps=12))


def cut(world, tmp_path, at=9, nodes=THREE, **order):
    """All ranks, killed after step ``at``. Each step was waited for."""
    said = world.run(
        len(nodes), kind="fsdp", root=tmp_path / "run", nodes=nodes, steps=12, base_every=4, kill=["all", at],
        wait_each_step=True, **order,
    )  # fmt: skip
    assert [each["code"] for each in said] == [-9] * len(nodes), said
    return said


def goes_on(world, tmp_path, nodes=THREE, steps=12, **order):
    return ended(world.run(len(nodes), kind="fsdp", root=tmp_path / "run", nodes=nodes, steps=steps, **order))


def test_a_lost_nodes_share_comes_from_its_partner(world, undisturbed, tmp_path):
    cut(world, tmp_path)
    shutil.rmtree(tmp_path / "run-2")
    said = goes_on(world, tmp_path)
    assert {each["resumed"] for each in said} == {8}
    for before, after in zip(undisturbed, said, strict=True):
        assert after["losses"] == before["losses"][8:]
        assert after["digests"].items() <= before["digests"].items()
    [found] = [e for e in read_events(tmp_path / "run-0" / "events.jsonl") if e["event"] == "shares"]
    tiers = {"rank-00000": "own disk", "rank-00001": "own disk", "rank-00002": "partner"}
    assert found["tiers"] == tiers and found["step"] == 8


def test_a_lost_nodes_share_comes_from_a_node_with_more_ranks(world, tmp_path):
    """One of the two ranks there keeps no copies, and answers nobody."""
    nodes = [0, 0, 1, 2]
    before = cut(world, tmp_path, nodes=nodes)
    shutil.rmtree(tmp_path / "run-2")
    said = goes_on(world, tmp_path, nodes=nodes, deadline_seconds=20)
    assert {each["resumed"] for each in said} == {8}
    assert said[0]["digests"]["8"] == before[0]["digests"]["8"]


def test_nothing_lost_needs_no_new_base(world, tmp_path):
    goes_on(world, tmp_path, steps=6)
    before = RunReader(tmp_path / "run-1").commits()
    goes_on(world, tmp_path, steps=7)
    assert RunReader(tmp_path / "run-1").commits() == before
    assert RunReader(tmp_path / "run-1").timeline_ids() == [1, 2]


def test_fewer_nodes_go_on_without_the_lost_one(world, tmp_path):
    """One rank keeps the copies of a node of two, and goes on as two nodes, of which one has a new disk."""
    before = cut(world, tmp_path, nodes=[0, 0, 1])
    shutil.rmtree(tmp_path / "run-0")
    said = goes_on(world, tmp_path, nodes=[0, 1], disks=[1, 2])
    assert {each["resumed"] for each in said} == {8}
    assert said[0]["digests"]["8"] == before[0]["digests"]["8"]


def test_a_pair_that_is_lost_is_refused_with_the_step_that_is_left(world, tmp_path):
    cut(world, tmp_path)
    for lost in (1, 2):  # 2 keeps the copies of 1
        shutil.rmtree(tmp_path / f"run-{lost}")
    before = sorted(path for path in tmp_path.rglob("*") if path.name != "lock")
    said = world.run(3, kind="fsdp", root=tmp_path / "run", nodes=THREE, steps=12)
    for each in said:
        assert "Damaged" in each["error"] and "rank-00001" in each["error"], each
        assert "No other step is whole" in each["error"]
    assert {*tmp_path.rglob("*.safetensors")} <= {*before}


def test_a_lost_node_is_named_to_the_others_at_once(world, tmp_path):
    """None of them sees its lock; one of them has its connection for copies."""
    said = world.run(
        3, kind="plain", root=tmp_path / "run", nodes=[0, 1, 2], steps=12, kill=[2, 6], wait_each_step=True
    )
    assert [each["code"] for each in said] == [0, 0, -9]
    for each in said[:2]:
        assert "RankFailed" in each["error"] and "rank 2" in each["error"], each
        assert each["raised_at"] - said[2]["died"] < 4


def test_a_best_base_without_a_share_is_none_of_the_best(world, tmp_path):
    """A share of it went with its node, the other copy with the partner, later."""
    three = {"nodes": [0, 1, 2], "keep_last": 1, "keep_best": 1}
    goes_on(world, tmp_path, steps=6, values={"2": 1.0}, **three)
    shutil.rmtree(tmp_path / "run-1")
    goes_on(world, tmp_path, steps=8, **three)
    assert 2 in [ref.step for ref in RunReader(tmp_path / "run-0").commits()]
    shutil.rmtree(tmp_path / "run-2")
    goes_on(world, tmp_path, steps=10, values={"9": 5.0}, **three)
    steps = [[ref.step for ref in RunReader(tmp_path / f"run-{node}").commits()] for node in range(3)]
    assert all(9 in each and 2 not in each for each in steps), steps


def test_nodes_take_no_more_than_their_cap_with_the_copies(world, tmp_path):
    cap, taken, end = 2_000_000, [0], threading.Event()

    def look():
        before = None
        while not end.wait(0.02):
            now = sizes(tmp_path)
            taken.append(sum(now.values()) if now == before else 0)
            before = now

    thread = threading.Thread(target=look)
    thread.start()
    options = {"base_every": 100_000, "unit_bytes": 1 << 20, "storage": cap}
    try:
        goes_on(world, tmp_path, nodes=[0, 1], steps=50, **options)
    finally:
        end.set()
        thread.join()
    assert max(taken) > cap / 4, "sizes were not seen"  # bases, and a quarter of what they leave for the log
    assert max(taken) <= cap


def sizes(folder):
    """The size of each file of the runs in ``folder``."""
    found = {}
    for path in folder.glob("*/*/**/*"):
        with suppress(FileNotFoundError):
            found[path] = path.stat().st_size if path.is_file() else 0
    return found


@pytest.mark.parametrize(
    "order, text",
    [
        ({"nodes": [0, 0]}, "all 2 ranks are on one"),
        ({"nodes": [0, 1], "partner_offset": 2}, "its own partner"),
        ({"nodes": [0, 1], "disks": [0, 0]}, "'s node as well"),
        ({"nodes": [0, 1], "replica": True}, "replica="),
    ],
    ids=["one node", "own partner", "one directory", "replica"],
)
def test_what_cannot_be_is_refused_and_nothing_written(world, tmp_path, order, text):
    said = world.run(2, kind="fsdp", root=tmp_path / "run", steps=2, **order)
    assert any(text in each.get("error", "") for each in said), said
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.json")]
