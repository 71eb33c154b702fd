"""A run directory: what is published is there, whole, and retained as promised."""

from __future__ import annotations

import pytest

from holdfast.errors import NoCommit, PoolExhausted, RunLocked, StaleCommit
from holdfast.store.local import LocalStore
from tiny_run import TinyRun, check_content


def test_a_published_step_is_the_head_with_its_bytes(run):
    manifest = run.take_step()
    reader = LocalStore.read(run.store.root)
    assert reader.head() == manifest
    check_content(reader, manifest)
    assert reader.verify(manifest) == []


def test_the_newest_retain_steps_stay_and_no_more(run):
    for _ in range(6):
        run.take_step()
    assert [ref.step for ref in run.store.commits()] == [6, 5]
    for ref in run.store.commits():
        check_content(run.store, run.store.load(ref))


def test_resume_continues_in_a_new_timeline(tmp_path):
    with TinyRun(tmp_path / "run") as first:
        first.take_step()
        last = first.take_step()
    with TinyRun(tmp_path / "run") as second:
        assert second.resumed == last
        manifest = second.take_step()
        assert (manifest.timeline, manifest.parent, manifest.fork_step) == (2, 1, 2)
        assert [ref.step for ref in second.store.line()] == [3, 2]
        check_content(second.store, manifest)


def test_a_resume_from_an_earlier_step_leaves_the_later_one_until_its_room_is_needed(tmp_path):
    with TinyRun(tmp_path / "run") as first:
        for _ in range(4):
            first.take_step()
    with TinyRun(tmp_path / "run", fork=3) as second:
        assert [tuple(ref) for ref in second.store.commits()] == [(1, 4), (1, 3)]
        assert second.store.at(3).step == 3
        assert second.store.at(4).timeline == 1
        second.take_step()
        assert [tuple(ref) for ref in second.store.commits()] == [(2, 4), (1, 3)]
        second.take_step()
        assert [tuple(ref) for ref in second.store.line()] == [(2, 5), (2, 4)]


def test_a_step_that_is_not_there_is_named_with_those_that_are(run):
    run.take_step()
    with pytest.raises(NoCommit, match="has no step 7"):
        run.store.at(7)


def test_a_second_writer_is_told_who_the_first_is(run):
    import os

    with pytest.raises(RunLocked, match=f"process {os.getpid()} on "):
        LocalStore.open(run.store.root)


def test_a_writer_of_an_abandoned_timeline_is_fenced_off(run):
    run.take_step()
    record = run.store.root / "timelines" / "t0002.json"
    record.write_bytes((run.store.root / "timelines" / "t0001.json").read_bytes())
    with pytest.raises(StaleCommit, match="timeline 2 was opened while this writer was in 1"):
        run.take_step()


def test_a_unit_has_a_free_generation_between_steps_and_none_beyond_its_copies(run):
    run.take_step()
    run.take_step()
    unit = run.units["block_0"]
    generation = unit.acquire()
    with pytest.raises(PoolExhausted, match="'block_0' has no free file"):
        unit.acquire()
    unit.release(generation)
    assert unit.acquire() == generation


def test_unknown_files_are_left_alone(tmp_path):
    root = tmp_path / "run"
    (root / "commits").mkdir(parents=True)
    strangers = [root / "notes.txt", root / "commits" / "mine.json", root / "commits" / "step-1.t1.json"]
    for path in strangers:
        path.write_text("mine")
    with TinyRun(root) as run:
        for _ in range(4):
            run.take_step()
    assert all(path.read_text() == "mine" for path in strangers)
