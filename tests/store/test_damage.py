"""Damage: whatever changes on the disk is found, named, and passed over for an older whole step."""

from __future__ import annotations

import random

import pytest

from combined import some_of
from holdfast.errors import ChunkCorrupt, Damaged, FileMissing, ManifestCorrupt, NoCommit, QueueClosed
from holdfast.io.queue import IOQueue
from holdfast.store.format.manifest import Timeline
from holdfast.store.run_store import LocalStore
from tiny_run import TinyRun, check_content, flip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("damage") / "run"
    with TinyRun(root) as run:
        for _ in range(3):
            run.take_step()
    return root


@pytest.fixture
def reader(root):
    """The run as it was written, before and after the test."""
    reader = LocalStore.read(root)
    kept = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    yield reader
    for path in root.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()
    for path, data in kept.items():
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
    assert reader.newest_whole()[1] == []


def parts_of(reader, manifest):
    """Every file that the commit refers to, by the class of its bytes."""
    data = [(file.path, "file") for file in manifest.files.values()]
    timeline = f"timelines/t{manifest.timeline:04d}.json"
    return [*data, (manifest.index["path"], "index"), (manifest.path, "manifest"), (timeline, "timeline")]


@pytest.mark.slow
def test_every_bit_flip_is_found_and_named(root, reader, queue):
    """Random bits of every class: payload, header, filler, index, manifest, timeline record."""
    rng = random.Random(0)
    manifest = reader.head()
    atoms = reader.atoms(manifest).keys()
    verify = LocalStore.read(root, queue=queue).verify
    for path, kind in parts_of(reader, manifest):
        size = (root / path).stat().st_size
        for _ in some_of(4, range(200)):
            bit = rng.randrange(size * 8)
            flip(root / path, bit)
            found = verify(manifest)
            assert [error.path for error in found] == [path], (path, bit)
            if kind == "file":
                (error,) = found
                assert isinstance(error, ChunkCorrupt)
                assert error.offset <= bit // 8 < error.offset + error.nbytes
                assert error.atoms and atoms >= set(error.atoms)
                assert path in str(error) and error.atoms[0] in str(error) and "offset" in str(error)
            flip(root / path, bit)


def test_every_bit_of_a_manifest_counts(root, reader):
    """All of them, white space and digest included."""
    path = root / reader.head().path
    ref = reader.commits()[0]
    for bit in some_of(5, range(path.stat().st_size * 8)):
        flip(path, bit)
        with pytest.raises(ManifestCorrupt):
            reader.load(ref)
        flip(path, bit)


def test_resume_passes_over_a_damaged_step_and_says_why(root, reader):
    manifest = reader.head()
    path = manifest.files["block_1"].path
    flip(root / path, 5000 * 8)
    whole, damaged = reader.newest_whole()
    assert (whole.step, manifest.step) == (2, 3)
    assert [error.path for error in damaged] == [path]
    assert "Step 2 does not use this file" in str(damaged[0])


def test_a_damaged_manifest_is_passed_over(root, reader):
    flip(root / reader.head().path, 100)
    whole, damaged = reader.newest_whole()
    assert whole.step == 2
    assert isinstance(damaged[0], ManifestCorrupt)


def test_a_damaged_timeline_record_is_found_and_repaired_by_the_next_writer(tmp_path):
    with TinyRun(tmp_path / "run") as run:
        run.take_step()
    flip(tmp_path / "run/timelines/t0001.json", 100)
    reader = LocalStore.read(tmp_path / "run")
    whole, damaged = reader.newest_whole()
    assert whole.step == 1
    assert [error.path for error in damaged] == ["timelines/t0001.json"]
    with TinyRun(tmp_path / "run") as run:
        assert run.step == 1
    assert reader.verify(whole) == []


def test_lost_timeline_records_are_written_again_with_the_run_that_they_belong_to(tmp_path):
    for _ in range(2):
        with TinyRun(tmp_path / "run") as run:
            run.take_step()
    for path in (tmp_path / "run/timelines").iterdir():
        path.unlink()
    with TinyRun(tmp_path / "run"):
        paths = [f"timelines/t000{number}.json" for number in (1, 2, 3)]
        first, second, third = (
            Timeline.decode((tmp_path / "run" / path).read_bytes(), path) for path in paths
        )
    assert first.run == second.run == third.run is not None


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
def test_a_file_of_another_size_is_found(root, reader, change):
    path = root / reader.head().files["block_0"].path
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    (error,) = reader.verify(reader.head())
    assert isinstance(error, FileMissing)
    assert f"has {len(data) + change} bytes, the manifest says {len(data)}" in str(error)


@pytest.mark.parametrize("which", ["data", "index", "timeline", "manifest"])
def test_a_missing_file_is_found(root, reader, which):
    manifest = reader.head()
    paths = {"data": manifest.files["block_0"].path, "index": manifest.index["path"],
             "timeline": "timelines/t0001.json", "manifest": manifest.path}  # fmt: skip
    (root / paths[which]).unlink()
    if which == "manifest":
        with pytest.raises(NoCommit, match="retired"):
            reader.verify(manifest)
        assert reader.newest_whole()[0].step == 2
    else:
        assert [type(error) for error in reader.verify(manifest)] == [FileMissing]


def test_swapped_files_are_found(root, reader):
    manifest = reader.head()
    this = root / manifest.files["block_0"].path
    other = root / reader.at(2).files["block_0"].path
    data = this.read_bytes()
    this.write_bytes(other.read_bytes())
    other.write_bytes(data)
    for step in (3, 2):
        (error,) = reader.verify(reader.at(step))
        assert isinstance(error, ChunkCorrupt)
    with pytest.raises(Damaged, match="none of its 2 commits is whole"):
        reader.newest_whole()


def test_swapped_manifests_are_found(root, reader):
    newest, older = (root / ref.path for ref in reader.commits())
    data = newest.read_bytes()
    newest.write_bytes(older.read_bytes())
    older.write_bytes(data)
    with pytest.raises(ManifestCorrupt, match="it is the manifest of commits/step-000000000002"):
        reader.head()


def test_reading_one_atom_verifies_it(root, reader):
    manifest = reader.head()
    check_content(reader, manifest)
    flip(root / manifest.files["block_0"].path, 4096 * 8)
    atoms = reader.atoms(manifest)
    with pytest.raises(ChunkCorrupt, match="expected xxh3:"):
        reader.read_atom(manifest, atoms["a.weight/param"])
    reader.read_atom(manifest, atoms["b.weight/param"])


def test_commits_of_which_nothing_can_be_read_are_damaged_and_not_absent(root, reader):
    for folder in ("commits", "timelines"):
        for path in (root / folder).iterdir():
            flip(path, 200)
    with pytest.raises(ManifestCorrupt, match="step-000000000003"):
        reader.head()
    with pytest.raises(Damaged, match="none of its 2 commits is whole"):
        reader.newest_whole()


def test_the_way_out_is_a_step_that_a_resume_goes_on_from(tmp_path):
    with TinyRun(tmp_path, copies=5) as run:
        for _ in range(3):
            run.take_step()
    with TinyRun(tmp_path, copies=5, fork=2) as run:
        path = run.take_step().files["block_1"].path  # step 3 is there twice, once left behind
        assert run.store.way_out(path).startswith("Step 2 does not use this file")


def test_a_damaged_read_of_a_unit_names_atoms_offset_and_the_way_out(tmp_path):
    with TinyRun(tmp_path / "run") as run:
        run.take_step()
        manifest = run.take_step()
        ref = manifest.files["block_1"]
        flip(tmp_path / "run" / ref.path, 9000 * 8)
        unit = run.units["block_1"]
        buffer = run.pool.take(ref.bytes, "state")
        future = unit.read(
            unit.generation_of(ref.path), buffer.view, ref.checksums, kind="state", phase="load", priority=0
        )
        with pytest.raises(ChunkCorrupt) as caught:
            future.result(30)
    error = caught.value
    assert error.atoms == ("b.weight/param", "b.weight/exp_avg")
    assert (error.path, error.offset, error.nbytes) == (ref.path, 0, ref.bytes)
    assert "Step 1 does not use this file" in str(error)


def test_a_run_without_a_whole_step_says_so(root, reader):
    for ref in reader.commits():
        flip(root / reader.load(ref).files["block_0"].path, 0)
    with pytest.raises(
        Damaged,
        match=r"none of its 2 commits is whole; the newest problem: 'a\.weight/param'.*running again finds no more",
    ):
        reader.newest_whole()


def test_a_block_that_cannot_be_read_is_damage_too(root, reader, monkeypatch):
    import errno
    import os

    manifest = reader.head()
    broken = str(root / manifest.files["block_0"].path)
    original = os.preadv

    def fail(fd, *rest):
        if os.readlink(f"/proc/self/fd/{fd}") == broken:
            raise OSError(errno.EIO, "Input/output error")
        return original(fd, *rest)

    monkeypatch.setattr(os, "preadv", fail)
    (error,) = reader.verify(manifest)
    assert "cannot be read" in str(error) and "Input/output error" in str(error)
    assert (error.path, error.atoms[0]) == (manifest.files["block_0"].path, "a.weight/param")
    assert reader.newest_whole()[0].step == 2


def test_a_closed_queue_is_no_damage(root):
    queue = IOQueue(1)
    queue.close()
    reader = LocalStore.read(root, queue=queue)
    with pytest.raises(QueueClosed):
        reader.verify(reader.head())
