"""A run directory: what is published is there, whole, and retained as promised."""

from __future__ import annotations

import time

import pytest

from holdfast.errors import (
    DiskFailed,
    DiskFull,
    EngineFailed,
    NoCommit,
    PoolExhausted,
    RunLocked,
    StaleCommit,
)
from holdfast.store import run_store
from holdfast.store.format.payload_layout import Layout
from holdfast.store.run_store import LocalStore
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


def test_nothing_is_written_before_an_opening_beside_reading_is_durable(tmp_path, monkeypatch):
    """Recovery reads meanwhile, and a failure of the disk ends the opening at its first write."""
    with TinyRun(tmp_path / "run") as run:
        last = run.take_step()
    done, write = [], run_store.write_durably

    def sync_all(*_):
        time.sleep(0.2)
        done.append("synced")

    def write_durably(*args, **options):
        done.append("written")
        write(*args, **options)

    monkeypatch.setattr(run_store, "sync_all", sync_all)
    monkeypatch.setattr(run_store, "write_durably", write_durably)
    with LocalStore(tmp_path / "run") as store:
        store.enter(syncs_beside=True)
        assert store.head() == last and done == []
        store.begin(last)
    assert done == ["synced", "written"]

    def fail(*_):
        raise DiskFailed("the device is gone")

    monkeypatch.setattr(run_store, "sync_all", fail)
    with LocalStore(tmp_path / "run") as store:
        store.enter(syncs_beside=True)
        for _ in range(2):
            with pytest.raises(DiskFailed, match="gone"):
                store.begin(last)


def test_a_resume_from_an_earlier_step_leaves_the_later_one_until_its_room_is_needed(tmp_path):
    with TinyRun(tmp_path / "run") as first:
        for _ in range(4):
            first.take_step()
    with TinyRun(tmp_path / "run", fork=3) as second:
        assert [tuple(ref) for ref in second.store.commits()] == [(1, 4), (1, 3)]
        assert second.store.at(3).step == 3
        assert second.store.at(4, timeline=1).timeline == 1
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

    with pytest.raises(RunLocked, match=f"this very process .{os.getpid()}."):
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
    strangers = [
        root / "notes.txt",
        root / "commits" / "mine.json",
        root / "commits" / "step-1.t1.json",
        root / "commits" / "x.json.tmp",
    ]
    for path in strangers:
        path.write_text("mine")
    with TinyRun(root) as run:
        for _ in range(4):
            run.take_step()
    assert all(path.read_text() == "mine" for path in strangers)


def test_only_synced_bytes_are_published(run):
    unit = run.units["block_0"]
    generation = unit.acquire()
    for checksums in [("0" * 16,), ()]:
        with pytest.raises(ValueError, match="was not written and synced with these checksums"):
            run.store.publish(1, {"block_0": (generation, checksums)}, run.index, {})
    assert run.store.commits() == []


def test_steps_of_a_line_only_go_up(run):
    run.take_step()
    files = dict(run.fixed)
    for step in (1, 0):
        with pytest.raises(ValueError, match=f"step {step} cannot follow step 1"):
            run.store.publish(step, files, run.index, {})


def test_a_timeline_is_opened_before_a_step_is_published(tmp_path):
    with (
        LocalStore.open(tmp_path / "run") as store,
        pytest.raises(ValueError, match="begin\\(\\) opens the timeline"),
    ):
        store.publish(1, {}, {}, {})


def test_a_closed_store_writes_nothing_more(tmp_path):
    with TinyRun(tmp_path / "run") as run:
        pass
    with pytest.raises(ValueError, match="is not open for writing"):
        run.store.begin(None)
    run.store.close()


def test_two_copies_keep_one_whole_step(tmp_path):
    with TinyRun(tmp_path / "run", copies=2, retain=1) as run:
        for _ in range(3):
            manifest = run.take_step()
        assert [ref.step for ref in run.store.commits()] == [3]
        check_content(run.store, manifest)


def test_a_frozen_unit_is_written_once_and_named_by_every_commit(tmp_path):
    with TinyRun(tmp_path / "run") as run:
        for _ in range(3):
            run.take_step()
        written = run.queue.counters()
    with TinyRun(tmp_path / "run") as run:
        manifest = run.take_step()
        assert manifest.files["frozen"].path == "data/frozen.0.safetensors"
        assert not run.queue.counters()[("write", "state", "update")] % sum(
            unit.layout.file_bytes for unit in run.units.values()
        )
        check_content(run.store, manifest)
    assert written[("write", "state", "update")] == 3 * sum(
        unit.layout.file_bytes for unit in run.units.values()
    ) + sum(unit.layout.file_bytes for unit in run.frozen_units.values())


def test_an_index_goes_when_the_last_commit_that_names_it_is_retired(run):
    run.take_step()
    old = run.index
    run.index = run.store.put_index({"version": 1, "atoms": {}})
    run.take_step()
    assert (run.store.root / old["path"]).exists()
    run.take_step()
    assert not (run.store.root / old["path"]).exists()
    assert (run.store.root / run.index["path"]).exists()


def test_a_failed_publish_closes_the_store_and_the_run_resumes(tmp_path, monkeypatch):
    import errno
    import os

    with TinyRun(tmp_path / "run") as run:
        run.take_step()

        def fail(fd):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(DiskFailed, match=r"cannot sync .*commits: Input/output error"):
                run.take_step()
        with pytest.raises(EngineFailed, match=r"an earlier write to .* failed .*; run again to resume"):
            run.take_step()
    with TinyRun(tmp_path / "run") as run:
        assert run.step in (1, 2)
        check_content(run.store, run.take_step())


def test_space_is_counted_before_it_is_taken(tmp_path):
    with LocalStore.open(tmp_path / "run") as store:
        unit = store.unit("block_0", Layout.build([("w/param", "F32", (5000,))]), 3)
        assert store.space_needed([unit], 10) == 3 * unit.layout.file_bytes + 10
        unit.create()
        assert store.space_needed([unit]) == 0
        assert store.free_bytes() > 0


@pytest.mark.root
def test_a_disk_that_fills_up_stops_the_run_and_an_emptied_one_resumes_it(tmp_path):
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounting is refused here: {done.stderr.decode().strip()}")
    try:
        with TinyRun(mount / "run", direct=False) as run:
            run.take_step()
            with pytest.raises(OSError, match="No space left"):
                (mount / "ballast").write_bytes(bytes(1 << 20))
            with pytest.raises(
                DiskFull, match=rf"no space left in {mount}/run/commits: .* 0 \(0 B\) are free"
            ):
                run.take_step()
        (mount / "ballast").unlink()
        with TinyRun(mount / "run", direct=False) as run:
            assert run.step == 1
            check_content(run.store, run.take_step())
    finally:
        subprocess.run(["umount", mount], check=True)


def test_half_made_files_of_a_killed_process_are_removed(tmp_path):
    with TinyRun(tmp_path / "run") as run:
        manifest = run.take_step()
    leftovers = [f"{path}.tmp" for path in (manifest.path, "timelines/t0009.json", manifest.index["path"])]
    for path in leftovers:
        (tmp_path / "run" / path).write_text("half")
    with TinyRun(tmp_path / "run"):
        assert not any((tmp_path / "run" / path).exists() for path in leftovers)


def test_progress_that_is_no_json_is_refused_and_harms_nothing(run):
    unit = run.units["block_0"]
    generation = unit.acquire()
    files = {"block_0": (generation, run.write(unit, generation, 1, 1))}
    with pytest.raises(TypeError, match="not JSON serializable"):
        run.store.publish(1, files, run.index, {"x": object()})
    unit.release(generation)
    run.take_step()
