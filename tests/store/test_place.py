"""A writer stays with the directory that it opened, and stops when that is not there under its name any more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.errors import BadInput, DiskFailed, EngineFailed, StaleCommit
from holdfast.store.disk import Disk
from holdfast.store.path_checks import refuse_foreign_checkpoint
from holdfast.store.run_store import LocalStore
from tiny_run import TinyRun, check_content


def contents(root):
    """Every file below ``root`` with its bytes; a lock's mean nothing once it is let go of."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_relative_path_means_the_directory_it_meant_at_opening(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "b")
    with TinyRun("run") as other:
        other.take_step()
    before = contents(tmp_path / "b")
    monkeypatch.chdir(tmp_path / "a")
    with TinyRun("run") as run:
        monkeypatch.chdir(tmp_path / "b")
        run.take_step()
        run.take_step()
    assert contents(tmp_path / "b") == before
    reader = LocalStore.read(tmp_path / "a" / "run")
    assert reader.newest_whole()[0].step == 2


def test_a_link_that_is_turned_to_another_directory_does_not_take_the_run_there(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link = tmp_path / "latest"
    link.symlink_to("first")
    with TinyRun(link) as run:
        link.unlink()
        link.symlink_to("second")
        run.take_step()
    assert list((tmp_path / "second").iterdir()) == []
    assert LocalStore.read(tmp_path / "first").newest_whole()[0].step == 1


def move_away(root):
    root.rename(root.with_name("moved"))


def replace_by_another_run(root):
    move_away(root)
    with TinyRun(root) as other:
        other.take_step()


def remove_lock(root):
    (root / "lock").unlink()


def replace_lock(root):
    remove_lock(root)
    (root / "lock").touch()


@pytest.mark.parametrize("harm", [move_away, replace_by_another_run, remove_lock, replace_lock])
def test_a_writer_whose_directory_or_lock_was_taken_away_writes_nothing_more(tmp_path, harm):
    root = tmp_path / "run"
    with TinyRun(root) as run:
        manifest = run.take_step()
        harm(root)
        before = contents(tmp_path)
        with pytest.raises(StaleCommit, match=r"its lock was removed.* what was acknowledged stays"):
            run.take_step()
        with pytest.raises(StaleCommit):
            run.store.scratch("params", 4096)
    assert contents(tmp_path) == before
    moved = tmp_path / "moved"
    with TinyRun(moved if moved.exists() else root) as again:
        assert again.resumed == manifest
        check_content(again.store, again.take_step())


def test_a_generation_is_not_written_once_the_lock_is_gone(run):
    run.take_step()
    unit = run.units["block_0"]
    generation = unit.acquire()
    run.write(unit, generation, 1, 2)
    before = contents(run.store.root / "data")
    remove_lock(run.store.root)
    with pytest.raises(StaleCommit):
        run.write(unit, generation, 9, 9)
    assert contents(run.store.root / "data") == before


def test_a_file_is_not_opened_in_a_directory_that_was_moved(run):
    unit = run.units["block_0"]
    image = bytearray(unit.layout.file_bytes)
    move_away(run.store.root)
    with pytest.raises(StaleCommit):
        unit.read(2, memoryview(image), ("0" * 16,), kind="state", phase="setup", priority=0)


def replace_by_copy(path):
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


def truncate(path):
    os.truncate(path, 4096)


HARMS = [os.unlink, replace_by_copy, truncate]


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_taken_away_under_a_writer_fails_its_write_by_name(run, monkeypatch, harm):
    run.take_step()
    unit = run.units["block_1"]
    generation = unit.acquire()
    run.write(unit, generation, 1, 2)
    original = Disk.sync

    def sync_then_harm(self, target, *, why):
        original(self, target, why=why)
        harm(run.store.root / unit.path(generation))

    monkeypatch.setattr(Disk, "sync", sync_then_harm)
    with pytest.raises(DiskFailed, match=rf"{unit.path(generation)} was removed, replaced or truncated"):
        run.write(unit, generation, 1, 2)
    monkeypatch.undo()


@pytest.mark.parametrize("harm", HARMS)
def test_a_step_whose_files_were_taken_away_after_their_write_is_not_acknowledged(tmp_path, harm):
    with TinyRun(tmp_path) as run:
        run.take_step()
        files = dict(run.fixed)
        for name, unit in run.units.items():
            generation = unit.acquire()
            files[name] = generation, run.write(unit, generation, 1, 2)
        path = run.units["block_1"].path(files["block_1"][0])
        harm(run.store.root / path)
        with pytest.raises(DiskFailed, match=rf"{path} was removed, replaced or truncated"):
            run.store.publish(2, files, run.index, {})
        assert [ref.step for ref in run.store.commits()] == [1]
    with TinyRun(tmp_path) as run:
        assert run.step == 1
        check_content(run.store, run.take_step())


@pytest.mark.parametrize("harm", [os.unlink, truncate])
def test_a_frozen_file_that_this_process_never_opened_must_be_there_too(tmp_path, harm):
    with TinyRun(tmp_path) as run:
        run.take_step()
    with TinyRun(tmp_path) as run:
        harm(tmp_path / "data" / "frozen.0.safetensors")
        with pytest.raises(DiskFailed, match=r"data/frozen\.0\.safetensors was removed"):
            run.take_step()
        assert [ref.step for ref in run.store.commits()] == [1]


def test_a_directory_replaced_during_the_publication_is_not_acknowledged(run, monkeypatch):
    """Between the check before it and its end."""
    original = Disk.sync_dir

    def sync_then_replace(self, path, *, why):
        original(self, path, why=why)
        if why == "manifest directory":
            replace_lock(run.store.root)

    monkeypatch.setattr(Disk, "sync_dir", sync_then_replace)
    for _ in range(2):
        with pytest.raises((StaleCommit, EngineFailed)):
            run.take_step()
    assert [ref.step for ref in run.store.commits()] == [1]


def test_a_forked_child_keeps_its_own_lock_and_leaves_its_parents_run_alone(tmp_path):
    """The child's lock gets the number of the descriptor that the fork closed."""
    code = """
import os, sys
from holdfast.errors import RunLocked, StaleCommit
from holdfast.store.run_store import LocalStore
parents = LocalStore.open(sys.argv[1] + "/parents")
parents.scratch("params", 4096)
if os.fork() == 0:
    own = LocalStore.open(sys.argv[1] + "/own")
    try:
        parents.begin(None)
    except StaleCommit:
        print("refused", flush=True)
    parents.close()
    try:
        LocalStore.open(sys.argv[1] + "/own")
    except RunLocked:
        print("locked", flush=True)
    os._exit(0)
os.wait()
print(os.listdir(sys.argv[1] + "/parents/scratch"), os.listdir(sys.argv[1] + "/parents/timelines"))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["refused", "locked", "['params.bin'] []"], done.stderr


@pytest.mark.parametrize("name", ["ftruncate", "close"])
def test_a_lock_is_let_go_of_although_the_disk_fails(tmp_path, monkeypatch, name):
    disk = Disk(tmp_path)
    lock = disk.lock("lock", {"pid": 1, "host": "here"})
    original = getattr(os, name)

    def fail(fd, *rest):
        if name == "close":
            original(fd)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        lock.release()
    disk.lock("lock", {"pid": 2, "host": "here"}).release()


def test_a_store_whose_files_fail_to_close_lets_go_of_its_lock(tmp_path, monkeypatch):
    with TinyRun(tmp_path) as run:
        run.take_step()
        with monkeypatch.context() as patch:
            patch.setattr(run.units["block_0"], "close", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                run.store.close()
        run.units["block_0"].close()
        Disk(tmp_path).lock("lock", {"pid": 2, "host": "here"}).release()


def bad_places(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "taken" / "lock").mkdir(parents=True)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "data").symlink_to(tmp_path / "absent")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "commits").touch()
    names = ("file", "file/run", "file/a/run", "dangling", "loop", "x" * 300, "taken", "half", "odd")
    return [tmp_path / name for name in names]


@pytest.mark.parametrize("number", range(9))
def test_a_path_that_cannot_be_a_run_is_bad_input_that_names_it(tmp_path, number):
    path = bad_places(tmp_path)[number]
    with pytest.raises(BadInput) as caught:
        LocalStore.open(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("there", [True, False])
def test_a_place_that_may_not_be_written_is_bad_input(tmp_path, monkeypatch, there):
    root = tmp_path if there else tmp_path / "a" / "run"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may do everything
    with pytest.raises(
        BadInput, match=f"{root} cannot be used as a directory: Permission denied: {tmp_path}"
    ):
        LocalStore.open(root)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", ".metadata", "pytorch_model.bin", "latest", "latest_universal"]
)
def test_no_run_begins_in_foreign_checkpoint(tmp_path, name):
    """A run there would begin at step 0, where its author means to continue the checkpoint."""
    (tmp_path / name).write_text("global_step7")
    (tmp_path / "global_step7").mkdir()
    with pytest.raises(BadInput, match=rf"a checkpoint of another library: it has {name}\. .* source= "):
        refuse_foreign_checkpoint(tmp_path)


def test_run_may_begin_beside_a_file_named_latest(tmp_path):
    (tmp_path / "step_100.pt").write_bytes(bytes(9000))
    (tmp_path / "latest").symlink_to("step_100.pt")
    refuse_foreign_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("step_100.pt")
    refuse_foreign_checkpoint(tmp_path)


def test_run_ignores_foreign_checkpoint_beside(tmp_path):
    with TinyRun(tmp_path) as run:
        run.take_step()
    (tmp_path / "model.safetensors").write_text("of others")
    refuse_foreign_checkpoint(tmp_path)


@pytest.mark.parametrize("inside", ["data", "commits", "journal/rank-00000", "scratch/a/b"])
def test_no_run_begins_among_the_files_of_another(tmp_path, inside):
    with TinyRun(tmp_path / "run") as run:
        run.take_step()
    before = contents(tmp_path)
    with pytest.raises(
        BadInput, match=rf"is among the files of the run {tmp_path / 'run'}, and no run itself"
    ):
        LocalStore.open(tmp_path / "run" / inside)
    assert contents(tmp_path) == before
    for other in (tmp_path / "run" / "trials" / "1", tmp_path / "data"):  # no files of the run
        with TinyRun(other) as run:
            run.take_step()
    (tmp_path / "data").rename(
        tmp_path / "run" / "data" / "old"
    )  # what somebody has put there is gone on with
    with TinyRun(tmp_path / "run" / "data" / "old") as run:
        assert run.resumed.step == 1
