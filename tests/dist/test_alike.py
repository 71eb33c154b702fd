"""Ranks that hold the same compare it when bases are made, and one that has something else is named."""

from __future__ import annotations

import pytest

from dist.world import ended, finished
from holdfast.events import read_events
from holdfast.store.reader import RunReader


def compared(root):
    """The events of comparisons."""
    return [event for event in read_events(root / "events.jsonl") if event["event"] == "copies"]


def marks(root):
    """Of the newest base: what of its copies it says."""
    with RunReader(root) as reader:
        manifest = reader.head()
        assert reader.verify(manifest) == []
        return manifest.progress_of(manifest.streams[0]).get("copies")


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind, ranks", [("ddp", 2), ("ddp", 4), ("tp", 2), ("hsdp", 4)])
def test_copies_that_are_the_same_are_found_to_be(world, tmp_path, kind, ranks):
    """At once before a base that all wait for, and beside training."""
    mlp = {"mlp": 8} if kind == "tp" else {}
    said = ended(
        world.run(
            ranks,
            kind=kind,
            root=tmp_path,
            steps=50,
            base_every=5,
            save_at=50,
            pause=0.03,
            digests_from=50,
            **mlp,
        )
    )
    events = compared(tmp_path)
    steps = {
        event["step"] for event in events if event["compared"]
    }  # on a slow machine one may hear too late
    assert {0, 50} < steps and not any(event.get("different") for event in events)
    assert marks(tmp_path) is None and not any(
        "do not" in text for each in said for text in each.get("warnings", [])
    )


def test_ranks_that_hold_nothing_alike_compare_nothing(world, tmp_path):
    ended(world.run(2, kind="fsdp", root=tmp_path, steps=20, base_every=5, save_at=20, pause=0.03))
    assert compared(tmp_path) == []


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_holds_something_else_is_named_and_the_base_is_marked(world, tmp_path, who):
    """Whether it is the one that stores it or not; and the run goes on."""
    options = {"kind": "ddp", "root": tmp_path, "base_every": 1000}
    said = finished(world.run(2, steps=8, altered=[who, 4], save_at=6, **options))
    [before, event] = compared(tmp_path)
    assert before["different"] is None and event["step"] == 6
    assert "second.weight" in event["different"] and "than rank" in event["different"]
    for each in said:
        [text] = [text for text in each["warnings"] if "should hold the same do not" in text]
        assert event["different"] in text and "at step 6" in text
    assert marks(tmp_path) == {"step": 6, "different": event["different"]}
    after = ended(world.run(2, steps=9, **options))
    assert after[0]["resumed"] == 8


def test_what_differs_is_found_beside_training_too_and_is_no_more_when_it_was_mended(world, tmp_path):
    """Of four ranks that hold two parts twice, one has something else; the ranks that resume have all the same."""
    options = {"kind": "hsdp", "root": tmp_path, "base_every": 5, "pause": 0.03, "keep_last": 99}
    said = finished(world.run(4, steps=50, altered=[3, 4], digests_from=51, **options))
    found = [event for event in compared(tmp_path) if event.get("different")]
    assert found and all("rank 3" in event["different"] for event in found)
    assert all("rank 2" not in event["different"] and "rank 0" not in event["different"] for event in found)
    for each in said:
        assert 1 <= sum("should hold the same" in text for text in each["warnings"]) <= len(found)
    assert marks(tmp_path)["different"] == found[-1]["different"]
    ended(world.run(4, steps=52, save_at=51, digests_from=52, **options))
    assert compared(tmp_path)[-1]["different"] is None and marks(tmp_path) is None
