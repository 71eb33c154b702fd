"""Atoms are joined from their fragments, wherever these lie, and verified."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest

from holdfast.errors import CommitRetired, Damaged, NoCommit
from holdfast.io.buffers import Buffer
from holdfast.store import verifying
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, Layout
from holdfast.store.run_store import LocalStore
from tiny_run import check_content, index_of

HOW = {"kind": "state", "phase": "update", "priority": 0}


def publish(root, tensors, atoms, values):
    """A commit of the units ``tensors`` holding ``values`` (unit -> key -> bytes)."""
    with LocalStore.open(root) as store:
        store.begin(None)
        files = {}
        for name, rows in tensors.items():
            unit = store.unit(name, Layout.build(rows), 3)
            unit.create()
            generation, image = unit.acquire(), Buffer(unit.layout.file_bytes, "test").view
            for key, data in values[name].items():
                image[unit.layout[key].offset : unit.layout[key].end] = data
            files[name] = generation, unit.write(generation, image, **HOW).result(30)
        store.publish(1, files, store.put_index({"version": 1, "atoms": atoms}), {})
    return LocalStore.read(root)


def test_an_atom_cut_over_two_units_is_joined(tmp_path):
    whole = np.arange(35, dtype="<f4").reshape(5, 7)
    parts = {"left": whole[:, :3], "right": whole[:, 3:]}
    tensors = {"left": [("w/param", "F32", (5, 3))], "right": [("w/param", "F32", (5, 4))]}
    fragments = [
        {"unit": "left", "key": "w/param", "global": [[0, 0], [5, 3]], "local": [[0, 0], [5, 3]]},
        {"unit": "right", "key": "w/param", "global": [[0, 3], [5, 7]], "local": [[0, 0], [5, 4]]},
    ]
    atom = {"name": "w", "slot": "param", "shape": [5, 7], "dtype": "F32", "fragments": fragments}
    values = {name: {"w/param": part.tobytes()} for name, part in parts.items()}
    reader = publish(tmp_path / "run", tensors, {"w/param": atom}, values)
    manifest = reader.head()
    assert reader.atoms(manifest) == {"w/param": atom}
    assert reader.read_atom(manifest, atom) == whole.tobytes()


def test_an_atom_larger_than_a_block_and_an_empty_and_a_scalar_one(tmp_path):
    count = CHECKSUM_BLOCK // 4 + 104729
    rows = [("a/param", "F32", (count,)), ("b/param", "F32", (0, 3)), ("c/step", "I64", ())]
    values = {"a/param": np.arange(count, dtype="<f4").tobytes(), "b/param": b"", "c/step": b"12345678"}
    atoms = index_of({"u": rows})["atoms"]
    reader = publish(tmp_path / "run", {"u": rows}, atoms, {"u": values})
    for key, data in values.items():
        assert reader.read_atom(reader.head(), atoms[key]) == data


def test_fragments_that_leave_a_gap_are_damage(tmp_path):
    fragment = {"unit": "u", "key": "w/param", "global": [[0], [3]], "local": [[0], [3]]}
    atom = {"name": "w", "slot": "param", "shape": [4], "dtype": "U8", "fragments": [fragment]}
    reader = publish(
        tmp_path / "run", {"u": [("w/param", "U8", (3,))]}, {"w/param": atom}, {"u": {"w/param": b"abc"}}
    )
    with pytest.raises(Damaged, match="'w/param' of step 1: its fragments cover 3 elements of"):
        reader.read_atom(reader.head(), atom)


def test_what_is_no_run_directory_is_said_to_be_none(tmp_path):
    with pytest.raises(NoCommit, match="is not a run directory"):
        LocalStore.read(tmp_path)
    with LocalStore.open(tmp_path / "run") as store:
        assert store.head() is None
        with pytest.raises(NoCommit, match="has no commit yet"):
            store.newest_whole()


def test_reading_takes_no_lock_and_writes_nothing(run):
    manifest = run.take_step()
    before = {path: path.stat().st_mtime_ns for path in run.store.root.rglob("*")}
    reader = LocalStore.read(run.store.root)
    assert reader.verify(manifest) == []
    reader.timelines()
    assert {path: path.stat().st_mtime_ns for path in run.store.root.rglob("*")} == before


def test_the_newest_whole_commit_is_a_newer_one_if_it_is_retired_while_it_is_read(run, monkeypatch):
    run.take_step()
    reader, original, steps = LocalStore.read(run.store.root), verifying._Scan.run, [1, 2, 3]

    def overtaken(scan):
        while steps:
            steps.pop()
            run.take_step()
        return original(scan)

    monkeypatch.setattr(verifying._Scan, "run", overtaken)
    manifest, damaged = reader.newest_whole()
    assert (manifest.step, damaged) == (4, [])


def test_beside_a_writer_at_work_a_commit_reads_whole_or_is_said_to_be_retired(run):
    run.take_step()
    enough = threading.Event()

    def work():
        while not enough.is_set():
            run.take_step()

    writer = threading.Thread(target=work)
    writer.start()
    try:
        for _ in range(50):
            with suppress(CommitRetired):
                reader = LocalStore.read(run.store.root, queue=run.queue)
                manifest = reader.head()
                check_content(reader, manifest)
                assert reader.verify(manifest) == []
    finally:
        enough.set()
        writer.join()


def published_again(run, manifest):
    """As MeZO does when its weights have caught up: the same step in other files, and its own are written over."""
    files = dict(run.fixed)
    for name, unit in run.units.items():
        generation = unit.acquire()
        files[name] = generation, run.write(unit, generation, run.timeline, run.step)
    run.store.publish(manifest.step, files, run.index, manifest.progress, again=True)
    for ref in (ref for name, ref in manifest.files.items() if name in run.units):
        (run.store.root / ref.path).write_bytes(bytes(ref.bytes))


def test_a_commit_that_is_published_again_while_it_is_read_is_no_damage(run):
    run.take_step()
    reader = LocalStore.read(run.store.root)
    first = reader.head()
    published_again(run, first)
    again = reader.head()
    assert again.ref == first.ref and not reader.is_listed(first) and reader.is_listed(again)
    for read in (lambda: reader.verify(first), lambda: check_content(reader, first)):
        with pytest.raises(CommitRetired, match=r"step 1 of .* was published again"):
            read()
    assert reader.verify(again) == []
    check_content(reader, again)


def test_the_newest_whole_commit_is_the_same_step_if_it_is_published_again_meanwhile(run, monkeypatch):
    first = run.take_step()
    reader, original, times = LocalStore.read(run.store.root), verifying._Scan.run, [1]

    def overtaken(scan):
        if times:
            times.pop()
            published_again(run, first)
        return original(scan)

    monkeypatch.setattr(verifying._Scan, "run", overtaken)
    manifest, damaged = reader.newest_whole()
    assert (manifest.step, damaged) == (1, []) and manifest != first


def test_a_manifest_that_is_damaged_while_it_is_read_is_damage(run):
    manifest = run.take_step()
    reader = LocalStore.read(run.store.root)
    (run.store.root / manifest.path).write_bytes(b"{")
    assert [error.path for error in reader.verify(manifest)] == [manifest.path]


def test_progress_of_a_verification_is_reported_in_bytes(run):
    manifest = run.take_step()
    reports = []
    run.store.verify(manifest, report=reports.append)
    assert reports[-1] == manifest.total_bytes
    assert reports == sorted(reports)


def test_commits_and_timelines_are_read_once_while_nobody_writes(run):
    run.take_step()
    reader = LocalStore.read(run.store.root)
    with reader.unchanging():
        before, timelines = reader.commits(), reader.timelines()
        run.take_step()
        assert reader.commits() == reader.line() == before and reader.timelines() is timelines
    assert reader.commits() == run.store.commits() != before
