"""Several ranks go back to one step together, or none of them does."""

from __future__ import annotations

import os
import shutil

import pytest

from dist.world import World, ended
from holdfast.events import read_events
from holdfast.store.reader import RunReader


@pytest.fixture(scope="module")
def world():
    with World("going_back") as world:
        yield world


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_go_back_and_end_as_if_they_had_not(world, tmp_path, kind):
    whole = ended(world.run_undisturbed(2, kind=kind, steps=9))
    found = ended(world.run(2, kind=kind, root=tmp_path / "back", steps=9, back={"7": 5, "8": 2}))
    for one, other in zip(whole, found, strict=True):
        assert other["same"] and other["digests"] == one["digests"]
        assert other["threads"][0] == other["threads"][1]
    again = ended(world.run(2, kind=kind, root=tmp_path / "back", steps=9))
    assert again[0]["resumed"] == 9 and again[0]["digests"]["9"] == whole[0]["digests"]["9"]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_bad_loss_on_one_rank_sends_all_back(world, tmp_path, kind):
    """After a forward pass without a backward one, whose gathered parameters must not stay."""
    whole = ended(world.run_undisturbed(2, kind=kind, steps=7))
    found = ended(world.run(2, kind=kind, root=tmp_path / "guarded", steps=7, bad_at=[1, 6]))
    for one, other in zip(whole, found, strict=True):
        assert other["went_to"] == 4
        assert other["digests"] == one["digests"]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_without_records_go_back_to_one_base(world, tmp_path, kind):
    whole = ended(world.run_undisturbed(2, kind=kind, steps=9))
    found = ended(world.run(2, kind=kind, root=tmp_path / "guarded", steps=9, bad_at=[1, 9], every=3))
    assert found[0]["went_to"] == found[1]["went_to"] in (0, 3, 6)
    assert [each["digests"]["9"] for each in found] == [each["digests"]["9"] for each in whole]


def test_nodes_go_back_and_then_lose_a_disk(world, tmp_path):
    order = {"kind": "fsdp", "nodes": [0, 1]}
    whole = ended(world.run_undisturbed(2, kind="fsdp", steps=10))
    found = ended(world.run(2, root=tmp_path / "back", steps=9, back={"7": 5, "8": 2}, **order))
    for one, other in zip(whole, found, strict=True):
        assert other["same"] and other["digests"].items() <= one["digests"].items()
        assert other["threads"][0] == other["threads"][1]
    shutil.rmtree(tmp_path / "back-1")
    again = ended(world.run(2, root=tmp_path / "back", steps=10, **order))
    assert again[0]["resumed"] == 9
    assert again[0]["digests"]["10"] == whole[0]["digests"]["10"]


@pytest.mark.parametrize("copy_every, reached", [(None, 4), (3, 3)])
def test_a_bad_loss_on_one_node_sends_all_back(world, tmp_path, copy_every, reached):
    """Over the disks, or from the copies in memory."""
    whole = ended(world.run_undisturbed(2, kind="fsdp", steps=7))
    order = {"kind": "fsdp", "nodes": [0, 1], "bad_at": [1, 6], "copy_every": copy_every}
    found = ended(world.run(2, root=tmp_path / "guarded", steps=7, **order))
    for one, other in zip(whole, found, strict=True):
        assert other["went_to"] == reached
        assert other["digests"] == one["digests"]


def test_an_error_on_one_rank_before_it_goes_back_is_one_on_all(world, tmp_path):
    found = world.run(2, kind="ddp", root=tmp_path, steps=6, fails_on=1, refused={"0": 0, "1": 0})
    assert "DiskFull" in found[1]["refused"] and "rank 1 failed" in found[0]["refused"], found


def test_all_ranks_make_a_base_where_one_knows_of_none(world, tmp_path):
    ended(world.run(2, kind="ddp", root=tmp_path, steps=4))
    before = RunReader(tmp_path).commits()
    again = ended(world.run(2, kind="ddp", root=tmp_path, steps=6, forgets_base=1))
    assert [each["resumed"] for each in again] == [4, 4]
    made = {ref for ref in RunReader(tmp_path).commits() if ref not in before}
    assert min(made).step == 4


def test_a_refusal_on_one_rank_is_one_on_all(world, tmp_path):
    ended(world.run(2, kind="ddp", root=tmp_path, steps=4))
    found = ended(world.run(2, kind="ddp", root=tmp_path, steps=6, refused={"0": 3, "1": 99}))
    assert "rank 1 failed" in found[0]["refused"] and "from 0 to 4" in found[1]["refused"]
    again = ended(world.run(2, kind="ddp", root=tmp_path, steps=7, refused={"0": 3, "1": 2}))
    assert all("other steps on other ranks" in said["refused"] for said in again)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_with_replicas_go_back_to_bases_and_to_the_last_step(world, tmp_path, kind):
    """To bases that there were, and in the middle of an iteration to one that the replicas make then."""
    memory = tmp_path / "memory"
    memory.mkdir()
    whole = ended(world.run_undisturbed(2, kind=kind, steps=10))
    order = {"kind": kind, "root": tmp_path / "back", "replica": memory}
    found = ended(world.run(2, steps=10, back={"5": 3, "7": 7, "8": 3}, **order))
    for one, other in zip(whole, found, strict=True):
        assert other["same"] and other["digests"].items() == one["digests"].items()
        assert other["threads"][0] == other["threads"][1] == other["threads"][2]
    assert not [
        event for event in read_events(tmp_path / "back" / "events.jsonl") if event["event"] == "drift"
    ]
    assert os.listdir(memory) == []
    again = ended(world.run(2, steps=10, **order))
    assert again[0]["resumed"] == 10 and again[0]["digests"]["10"] == whole[0]["digests"]["10"]


def test_a_rank_of_several_with_replicas_dies_after_they_went_back(world, tmp_path):
    """The replicas do no step that another rank may lack, counted from where they went back to."""
    (tmp_path / "memory").mkdir()
    order = {"kind": "fsdp", "root": tmp_path / "back", "replica": tmp_path / "memory"}
    whole = ended(world.run_undisturbed(2, kind="fsdp", steps=9))
    died = world.run(2, steps=9, back={"8": 3}, dies=[1, 5], **order)
    assert died[1]["code"] == -9 and "error" in died[0]
    again = ended(world.run(2, steps=9, **order))
    assert again[0]["resumed"] == again[1]["resumed"] == 4
    assert again[0]["digests"]["9"] == whole[0]["digests"]["9"]


def test_a_bad_loss_on_one_rank_sends_all_and_their_replicas_back(world, tmp_path):
    (tmp_path / "memory").mkdir()
    whole = ended(world.run_undisturbed(2, kind="ddp", steps=7))
    order = {"kind": "ddp", "replica": tmp_path / "memory", "bad_at": [1, 6]}
    found = ended(world.run(2, root=tmp_path / "guarded", steps=7, **order))
    for one, other in zip(whole, found, strict=True):
        assert other["went_to"] == 3
        assert other["digests"] == one["digests"]


def test_headers_of_each_log_are_read_by_one_rank(world, tmp_path):
    ended(world.run(3, kind="ddp", root=tmp_path, steps=4))
    again = ended(world.run(2, kind="ddp", root=tmp_path, steps=5))
    assert [each["read"] for each in again] == [["rank-00000", "rank-00002"], ["rank-00001"]]
    assert all(each["resumed"] == 4 for each in again)
