"""Several ranks of which some are on another kind of processor than the one that wrote the records."""

from __future__ import annotations

import pytest

from dist.world import World, ended, finished
from holdfast.events import read_events
from holdfast.store.reader import RunReader


@pytest.fixture(scope="module")
def world():
    with World("kinds") as world:
        yield world


def bases(root):
    with RunReader(root) as reader:
        return sorted((ref.timeline, ref.step) for ref in reader.commits())


@pytest.mark.parametrize("kind, nodes", [("fsdp", None), ("ddp", None), ("fsdp", [0, 1])])
def test_all_ranks_refuse_what_one_would_replay_otherwise(world, tmp_path, kind, nodes):
    """None has loaded anything, all raise one error, and with the kinds of before nothing is lost."""
    order = {"kind": kind, "root": tmp_path / "run", "nodes": nodes}
    whole = ended(world.run(2, steps=5, **order))
    found = finished(world.run(2, steps=6, others=[1], **order))
    for said in found:
        assert (said["refused"], said["step"], said["unchanged"]) == ("OtherArithmetic", 0, True)
        assert said["text"].startswith("on rank 1 of 2: ")
    again = ended(world.run(2, steps=5, **order))
    assert [said["resumed"] for said in again] == [5, 5]
    assert again[0]["digests"]["5"] == whole[0]["digests"]["5"]


def test_a_rank_on_another_kind_takes_its_own_records_back(world, tmp_path):
    """Each rank replays its own shard; of other kinds in other places both are refused."""
    order = {"kind": "fsdp", "root": tmp_path / "run"}
    whole = ended(world.run(2, steps=5, others=[1], **order))
    exchanged = finished(world.run(2, steps=6, others=[0], **order))
    assert all(said["text"].startswith("on rank 0, rank 1 of 2: ") for said in exchanged)
    again = ended(world.run(2, steps=5, others=[1], **order))
    assert again[0]["digests"]["5"] == whole[0]["digests"]["5"]
    alone = finished(world.run(1, steps=6, **order))
    assert (alone[0]["refused"], alone[0]["step"], alone[0]["unchanged"]) == ("OtherArithmetic", 0, True)


def test_all_ranks_fall_back_to_an_approximate_resume(world, tmp_path):
    order = {"kind": "fsdp", "root": tmp_path / "run"}
    whole = ended(world.run(2, steps=5, **order))
    found = ended(world.run(2, steps=7, others=[1], falls_back=True, **order))
    assert [(said["resumed"], said["exactness"]) for said in found] == [(5, "approximate")] * 2
    assert found[0]["digests"]["5"] != whole[0]["digests"]["5"]
    assert (2, 5) in bases(tmp_path / "run")  # what follows is exact again, on these kinds
    again = ended(world.run(2, steps=7, others=[1], **order))
    assert again[0]["resumed"] == 7 and again[0]["digests"]["7"] == found[0]["digests"]["7"]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_guard_goes_to_a_step_that_all_kinds_can_replay(world, tmp_path, kind):
    """One rank could replay the step before the resume, and another not: all go to the resume's base."""
    order = {"kind": kind, "root": tmp_path / "run"}
    ended(world.run(2, steps=5, **order))
    found = finished(world.run(2, steps=6, others=[1], falls_back=True, bad_at=5, **order))
    assert [said["went_to"] for said in found] == [5, 5]
    assert {said["digest_there"] for said in found} == {said["digests"]["5"] for said in found}


def test_a_rollback_that_one_kind_cannot_replay_changes_nothing(world, tmp_path):
    order = {"kind": "fsdp", "root": tmp_path / "run"}
    ended(world.run(2, steps=5, **order))
    found = ended(world.run(2, steps=7, others=[1], falls_back=True, back={"6": 3}, **order))
    assert sorted(said["not_back"] for said in found) == ["NoCommit", "RankFailed"]
    assert all(said["stays_at"] == 6 and said["unchanged"] for said in found)


def test_replicas_take_records_of_another_kind_only_by_request(world, tmp_path):
    """A replica's own steps are in no record, so a base of its run stands alone on any kind."""
    (tmp_path / "memory").mkdir()
    order = {"kind": "fsdp", "root": tmp_path / "run"}
    ended(world.run(2, steps=5, **order))
    beside = {**order, "replica": tmp_path / "memory"}
    refused = finished(world.run(2, steps=6, others=[1], **beside))
    assert [(said["refused"], said["unchanged"]) for said in refused] == [("OtherArithmetic", True)] * 2
    found = ended(world.run(2, steps=7, others=[1], falls_back=True, **beside))
    assert [said["exactness"] for said in found] == ["approximate"] * 2
    assert not [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "drift"]
    again = ended(world.run(2, steps=8, **beside))
    assert again[0]["resumed"] == 7 and again[0]["digests"]["7"] == found[0]["digests"]["7"]


def test_copies_are_equal_after_an_approximate_resume(world, tmp_path):
    """Under DDP each rank has replayed all of them, and the ranks round otherwise."""
    order = {"kind": "ddp", "root": tmp_path / "run"}
    ended(world.run(2, steps=5, **order))
    found = ended(world.run(2, steps=5, others=[1], falls_back=True, **order))
    assert not [e for e in read_events(tmp_path / "run" / "events.jsonl") if e.get("different")]
    again = ended(world.run(2, steps=5, **order))
    assert again[0]["digests"]["5"] == found[0]["digests"]["5"]
