"""Several ranks keep the best bases together, and leave in time together."""

from __future__ import annotations

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
