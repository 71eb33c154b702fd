"""Several ranks keep the best bases together, and leave in time together."""

from __future__ import annotations

import math
import shutil

import pytest

from dist.world import ended
from holdfast.events import read_events
from holdfast.store.reader import RunReader


def test_best_bases_of_ranks_are_kept_and_come_back(world, tmp_path):
    options = {"kind": "fsdp", "root": tmp_path, "keep_last": 1, "keep_best": 2, "base_every": 1000}
    values = {"2": 3.0, "4": 1.0, "6": 2.0, "7": 9.0}
    before = ended(world.run(2, steps=9, values=values, **options))
    with RunReader(tmp_path) as reader:
        found = {ref.step: reader.load(ref).metrics.get("loss") for ref in reader.commits()}
        assert found.items() >= {4: 1.0, 6: 2.0}.items() and 2 not in found
        assert all(reader.verify(reader.load(ref)) == [] for ref in reader.commits())
    after = ended(world.run(2, steps=10, resume={"step": 4}, **options))
    assert after[0]["digests"]["4"] == before[0]["digests"]["4"]


def test_metrics_that_differ_between_ranks_are_refused_on_all(world, tmp_path):
    said = world.run(2, kind="ddp", root=tmp_path, steps=9, values={"3": 1.0}, own_values=True, keep_best=1)
    assert all("BadInput: metrics is not the same on all ranks" in each["error"] for each in said)


def found_in(root):
    with RunReader(root) as reader:
        assert all(reader.verify(reader.load(ref)) == [] for ref in reader.line())
        return {ref.step: reader.load(ref).metrics.get("loss") for ref in reader.line()}


def test_best_bases_stay_with_other_numbers_of_ranks(world, tmp_path):
    """The older of two equal ones is better, whoever made it."""
    options = {"kind": "fsdp", "root": tmp_path, "keep_last": 1, "keep_best": 2, "base_every": 1000}
    two = ended(world.run(2, steps=6, values={"2": 3.0, "4": 1.0}, **options))
    ended(world.run(1, steps=8, values={"7": 1.0, "8": 1.0}, **options))
    ended(world.run(3, steps=10, values={"9": math.nan}, **options))
    assert found_in(tmp_path) == {4: 1.0, 7: 1.0, 8: None}  # three ranks went on from the last
    back = ended(world.run(3, steps=5, resume={"step": 4}, **options))
    assert back[0]["digests"]["4"] == two[0]["digests"]["4"]


def test_best_bases_of_nodes_outlive_a_disk(world, tmp_path):
    options = {"kind": "fsdp", "root": tmp_path / "run", "keep_last": 1, "keep_best": 2, "base_every": 1000}
    order = {"nodes": [0, 1], **options}
    before = ended(world.run(2, steps=8, values={"2": 3.0, "4": 1.0, "6": 2.0}, **order))
    shutil.rmtree(tmp_path / "run-1")
    ended(world.run(2, steps=9, values={"9": 5.0}, **order))
    for node in range(2):
        with RunReader(tmp_path / f"run-{node}") as reader:
            assert {4: 1.0, 6: 2.0}.items() <= {
                ref.step: reader.load(ref).metrics.get("loss") for ref in reader.line()
            }.items()
    back = ended(world.run(2, steps=5, resume={"step": 4}, **order))
    assert back[0]["digests"]["4"] == before[0]["digests"]["4"]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_before_the_best_is_kept_costs_no_other(world, tmp_path, dies):
    options = {"kind": "ddp", "root": tmp_path, "keep_last": 1, "keep_best": 1, "base_every": 1000}
    whole = ended(world.run_undisturbed(2, kind="ddp", steps=8))
    died = world.run(2, steps=8, values={"2": 2.0, "5": 1.0}, dies_at_best=[dies, 5], **options)
    assert died[dies]["code"] == -9 and "RankFailed" in died[1 - dies]["error"]
    again = ended(world.run(2, steps=8, values={"7": 3.0}, **options))
    assert again[0]["resumed"] >= 2 and again[0]["digests"]["8"] == whole[0]["digests"]["8"]
    found = found_in(tmp_path)
    assert found[2] == 2.0 and not {5, 7} & found.keys()


def test_metrics_of_one_rank_alone_end_all_and_say_so(world, tmp_path):
    said = world.run(
        2, kind="ddp", root=tmp_path, steps=9, values={"3": 1.0}, valueless=1, keep_best=1, deadline_seconds=4
    )
    assert "every rank has to give the same at the same steps" in said[0]["error"]
    assert said[1]["error"]


def test_what_is_kept_is_the_same_on_all_ranks(world, tmp_path):
    said = world.run(2, kind="ddp", root=tmp_path, steps=3, keeps_more=1)
    assert all("BadInput: keep= is not the same on all ranks" in each["error"] for each in said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("grace, is_slow", [(30.0, False), (0.4, True)])
def test_ranks_leave_in_time_and_say_what_they_leave_out(world, tmp_path, grace, is_slow):
    """A SIGTERM to one of them; the disk of the other may be slow."""
    slow = [0, 3, 5001] if is_slow else None
    options = {"kind": "ddp", "root": tmp_path, "base_every": 1000}
    cut = world.run(2, steps=5000, signal_at=[1, 9], slow=slow, grace_seconds=grace, **options)
    assert [said["error"] for said in cut] == ["SystemExit: 143"] * 2 and cut[0]["at"] == cut[1]["at"]
    left = [
        event["durable_step"]
        for event in read_events(tmp_path / "events.jsonl")
        if event["event"] == "left_out"
    ]
    rest = ended(world.run(2, steps=cut[0]["at"], **options))
    assert rest[0]["resumed"] == rest[1]["resumed"] and bool(left) == is_slow
    assert (
        (left[0] if left else cut[0]["at"]) <= rest[0]["resumed"] <= cut[0]["at"]
    )  # a write may end after all
