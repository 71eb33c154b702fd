"""Several ranks keep one cap on what their run takes of the disk, and nobody waits for anybody in vain."""

from __future__ import annotations

import os
import threading
from array import array
from contextlib import contextmanager

import pytest

from dist.world import ended
from holdfast.events import read_events
from holdfast.store.reader import RunReader


def files(root):
    """All files with their sizes; None where one went meanwhile."""
    found = {}
    try:
        journals = [f"journal/{name}" for name in os.listdir(root / "journal")]
        for folder in ("data", "index", "commits", "timelines", *journals):
            for name in os.listdir(root / folder):
                found[f"{folder}/{name}"] = os.path.getsize(root / folder / name)
    except FileNotFoundError:
        return None
    return found


@contextmanager
def watched(root, seconds=0.01):
    """What the run took of the disk, by looks ``seconds`` apart, each of them twice, when both saw the same."""
    seen, end = array("q"), threading.Event()

    def look():
        while not end.wait(seconds):
            now = files(root)
            if now is not None and now == files(root):
                seen.append(sum(now.values()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        end.set()
        thread.join()


COMMON = {"base_every": 100_000, "unit_bytes": 1 << 20, "deadline_seconds": 40}


def events(root, name):
    return [event for event in read_events(root / "events.jsonl") if event["event"] == name]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_never_take_more_of_the_disk_than_they_may_and_resume(world, tmp_path, kind):
    """A cap that is far too small for the cadence: ranks call each other to bases for want of room."""
    root, cap = tmp_path / "run", 2_500_000
    options = {**COMMON, "kind": kind, "root": root, "storage": cap, "digests_from": 150}
    whole = ended(world.run_undisturbed(2, kind=kind, steps=160, digests_from=150))
    with watched(root) as taken:
        said = ended(world.run(2, steps=150, **options))
    assert [each["durable"] for each in said] == [150, 150]
    assert cap / 2 < max(taken) <= cap and len(taken) > 100
    assert len(events(root, "base")) > 6 and not events(root, "gap"), events(root, "gap")
    with watched(root) as taken:
        rest = ended(world.run(2, steps=160, **options))
    assert rest[0]["resumed"] == 150 and max(taken) <= cap
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()


@pytest.mark.parametrize("cap", [300_000, 1_500_000])
def test_with_hardly_any_room_there_are_bases_instead_of_records(world, tmp_path, cap):
    """Not even the records of a few steps fit beside two bases. Where one did not make room, the next step is one."""
    root = tmp_path / "run"
    with watched(root) as taken:
        said = ended(world.run(2, kind="ddp", root=root, steps=60, storage=cap, digests_from=60, **COMMON))
    assert [each["durable"] for each in said] == [60, 60]
    assert max(taken) <= cap and all(each["lost"] < 36 for each in said)
    again = ended(world.run(2, kind="ddp", root=root, steps=60))
    assert again[0]["resumed"] == 60 and again[0]["digests"]["60"] == said[0]["digests"]["60"]


def test_what_is_kept_for_good_gives_way_to_the_cap_of_several_ranks_oldest_first(world, tmp_path):
    root, cap = tmp_path / "run", 2_000_000
    options = {**COMMON, "kind": "fsdp", "root": root, "storage": cap, "base_every": 5, "keep_every": 5}
    with watched(root) as taken:
        ended(world.run(2, steps=100, digests_from=100, **options))
    assert cap / 2 < max(taken) <= cap
    with RunReader(root) as reader:
        steps = [ref.step for ref in reader.line()]
        assert reader.verify(reader.head()) == []
    assert 2 < len(steps) < 19 and steps[0] > 90


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("worlds", [(3, 2), (1, 2)])
def test_another_number_of_ranks_keeps_the_cap_that_the_run_had(world, tmp_path, worlds):
    """What the ranks before left is counted too, and goes when nobody needs it."""
    one, other = worlds
    root, cap = tmp_path / "run", 2_500_000
    options = {**COMMON, "kind": "fsdp", "storage": cap}
    for ranks, steps in ((one, 40), (other, 90)):
        with watched(root) as taken:
            said = ended(world.run(ranks, root=root, steps=steps, digests_from=90, **options))
        assert max(taken) <= cap
    assert said[0]["durable"] == 90


def test_a_cap_in_which_the_files_of_no_two_bases_fit_is_refused_on_all_ranks(world, tmp_path):
    said = world.run(2, kind="ddp", root=tmp_path, steps=60, storage=100_000, **COMMON)
    assert all("is too little" in each["error"] and "Give at least" in each["error"] for each in said), said


def test_without_a_cap_each_rank_has_twenty_times_what_it_stores(world, tmp_path):
    said = ended(
        world.run(2, kind="ddp", root=tmp_path, steps=30, base_every=10, least_storage=1, unit_bytes=1 << 20)
    )
    assert all(each["cap"] == [20 * each["full"], 1.0] for each in said)
