"""Several ranks whose steps are kept by bases alone, or as ``every="auto"`` chooses, do so at the same steps."""

from __future__ import annotations

import pytest

from dist.world import ended
from holdfast.events import read_events
from holdfast.store.reader import RunReader
from support.switching import EVERY


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_bases_alone_are_of_the_same_step_on_all_ranks_and_come_back_after_a_kill(world, tmp_path, kind):
    whole = ended(world.run_undisturbed(2, kind=kind, steps=13))
    options = {"kind": kind, "root": tmp_path / "run", "every": 4, "steps": 13, "pause": 0.1}
    cut = world.run(2, kill=["all", 11], **options)
    assert [each["code"] for each in cut] == [-9, -9]
    with RunReader(tmp_path / "run") as reader:
        found = [reader.load(ref) for ref in reader.commits()]
        assert all(manifest.oldest_step == manifest.step for manifest in found)
        newest = reader.head().step
        assert newest in (4, 8) and reader.verify(reader.head()) == []
    after = ended(world.run(2, **options))
    assert [each["resumed"] for each in after] == [newest, newest]
    assert after[0]["digests"]["13"] == whole[0]["digests"]["13"]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kill", [30, 37])
def test_ranks_change_between_records_and_bases_alone_together(world, tmp_path, kill):
    whole = ended(world.run_undisturbed(2, kind="ddp", steps=50))
    options = {"kind": "ddp", "root": tmp_path / "run", "every": "auto", "switching": True, "steps": 50}
    cut = world.run(2, kill=["all", kill], **options)
    assert [each["code"] for each in cut] == [-9, -9]
    after = ended(world.run(2, **options))
    assert after[0]["resumed"] == after[1]["resumed"] >= max(each.get("durable", -1) for each in cut)
    assert after[0]["digests"]["50"] == whole[0]["digests"]["50"]
    found = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "every"]
    assert {event["every"] for event in found} == {1, EVERY}


def test_ranks_that_are_told_different_steps_are_refused(world, tmp_path):
    said = world.run(2, kind="ddp", root=tmp_path, steps=5, options_of={"0": {"every": 3}, "1": {"every": 1}})
    assert all("every= is not the same on all ranks (rank 0 3, rank 1 1)" in each["error"] for each in said)
