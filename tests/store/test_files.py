"""The disk reports what the system reports, by name, and its lock is one process's."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import BadInput, DiskFailed, DiskFull, RunLocked, StaleCommit
from holdfast.store.disk import Disk, write_durably


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "a" / "run")
    disk.makedirs("")
    return disk


def broken(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def synced(monkeypatch, disk):
    """The files that fsync is called for."""
    names, original = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (names.append(os.readlink(f"/proc/self/fd/{fd}")), original(fd))
    )
    return names


def test_directories_are_made_with_all_that_is_missing_above_and_synced(tmp_path, synced):
    disk = Disk(tmp_path / "b" / "c" / "run")
    disk.makedirs("")
    assert synced[:4] == [str(tmp_path / name) for name in ("b/c", "b", "")] + [str(tmp_path.parent)]
    assert os.path.ismount(synced[-1])
    synced.clear()
    disk.makedirs("data")
    assert (tmp_path / "b/c/run/data").is_dir()
    assert synced == [str(tmp_path / "b/c/run")]
    synced.clear()
    disk.makedirs("data")
    assert synced == [str(tmp_path / "b/c/run")]


def test_the_names_of_directories_that_were_there_are_made_durable_too(tmp_path, synced):
    """Whoever made them may have been killed before, or have copied the run a moment ago."""
    disk = Disk(tmp_path / "a" / "run")
    disk.makedirs("data")
    assert synced == [str(tmp_path / "a/run")]
    synced.clear()
    disk.makedirs("")
    assert synced[:3] == [str(tmp_path / "a"), str(tmp_path), str(tmp_path.parent)]
    assert os.path.ismount(synced[-1])


def test_directories_beyond_the_mount_point_are_left_alone(tmp_path, disk, synced, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path)
    disk.makedirs("")
    assert synced == [str(tmp_path / "a"), str(tmp_path)]


def test_a_directory_that_is_a_link_is_durable_where_it_leads(disk, synced, tmp_path):
    (tmp_path / "large" / "state").mkdir(parents=True)
    (disk.root / "data").symlink_to(tmp_path / "large" / "state")
    disk.makedirs("data")
    assert synced[:3] == [str(disk.root), str(tmp_path / "large"), str(tmp_path)]


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 104729])
def test_allocated_files_have_their_size_and_space(disk, nbytes):
    disk.allocate("file", nbytes)
    assert disk.size("file") == nbytes
    assert os.stat(disk.root / "file").st_blocks * 512 >= nbytes


def test_names_and_contents(disk):
    disk.write_bytes("b", b"data")
    disk.write_bytes("a", b"")
    assert disk.listdir("") == ["a", "b"]
    assert disk.listdir("absent") == []
    disk.rename("b", "a")
    assert (disk.read_bytes("a"), disk.exists("b"), disk.exists("a")) == (b"data", False, True)
    disk.unlink("a")
    disk.unlink("a")
    for call in (disk.size, disk.read_bytes, disk.open):
        with pytest.raises(FileNotFoundError):
            call("a")
    assert disk.free_bytes() > 0
    assert Disk(disk.root / "not" / "there").free_bytes() > 0


def test_a_durable_write_never_shows_anything_in_between(disk, monkeypatch):
    write_durably(disk, "file", b"old", why="test")
    for name in ("fdatasync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(
                "holdfast.store.disk._data_sync" if name == "fdatasync" else "os.replace", broken(errno.EIO)
            )
            with pytest.raises(DiskFailed, match=r"cannot (sync|rename) .*file\.tmp: Input/output error"):
                write_durably(disk, "file", b"new", why="test")
        assert disk.read_bytes("file") == b"old"
    write_durably(disk, "file", b"new", why="test")
    assert disk.read_bytes("file") == b"new"


def test_a_full_disk_is_told_from_a_failing_one(disk, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", broken(errno.ENOSPC))
    with pytest.raises(DiskFull, match=r"no space left in .*/run: 12345 bytes .* are needed for file"):
        disk.allocate("file", 12345)
    monkeypatch.setattr(os, "posix_fallocate", broken(errno.EIO))
    with pytest.raises(DiskFailed, match=r"cannot allocate .*/run/file: Input/output error"):
        disk.allocate("file", 12345)
    monkeypatch.setattr(os, "posix_fallocate", broken(errno.EOPNOTSUPP))
    disk.allocate("file", 12345)
    assert disk.size("file") == 12345


def test_the_lock_names_its_holder_and_goes_with_it(disk):
    lock = disk.lock("lock", {"pid": 123, "host": "elsewhere"})
    with pytest.raises(RunLocked, match="is being written by process 123 on elsewhere"):
        disk.lock("lock", {"pid": 124, "host": "here"})
    lock.release()
    disk.lock("lock", {"pid": 124, "host": "here"}).release()


def test_a_lock_left_by_a_killed_process_is_taken_over(disk):
    (disk.root / "lock").write_text(json.dumps({"pid": 1, "host": "gone" * 9}))
    lock = disk.lock("lock", {"pid": 124, "host": "here"})
    assert json.loads((disk.root / "lock").read_text()) == {"pid": 124, "host": "here"}
    lock.release()


def test_a_lock_whose_content_does_not_read_still_locks(disk):
    lock = disk.lock("lock", {})
    with pytest.raises(RunLocked, match="another process"):
        disk.lock("lock", {})
    lock.release()


@pytest.mark.parametrize("content", [b"", bytes(200), b'{"pid": 1, "ho'])
def test_what_a_power_cut_leaves_of_a_lock_is_taken_over(disk, content):
    (disk.root / "lock").write_bytes(content)
    disk.lock("lock", {"pid": 124, "host": "here"}).release()


@pytest.mark.parametrize("content", [b"hashes of packages", b"{}", b"\n"])
def test_a_lock_of_another_program_is_set_aside(disk, content):
    (disk.root / "lock").write_bytes(content)
    with pytest.warns(UserWarning, match="was no lock of this library"):
        disk.lock("lock", {"pid": 124, "host": "here"}).release()
    [aside] = disk.root.glob("lock.found-*")
    assert aside.read_bytes() == content


def test_stale_blocks_in_a_lock_are_overwritten(disk):
    """As a power cut leaves them on ext4 with data=writeback: the lock is never synced, and decides nothing."""
    disk.makedirs("commits")
    (disk.root / "lock").write_bytes(b"blocks of another file" * 400)
    lock = disk.lock("lock", {"pid": 124, "host": "here"})
    assert json.loads((disk.root / "lock").read_text()) == {"pid": 124, "host": "here"}
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(disk, number, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", broken(number))
    with pytest.raises(BadInput, match=r"locks no files .*-o flock"):
        disk.lock("lock", {})


def test_another_failure_of_a_lock_is_the_disks(disk, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", broken(errno.EIO))
    with pytest.raises(DiskFailed, match="lock"):
        disk.lock("lock", {})


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_that_is_removed_meanwhile_is_let_go(disk, monkeypatch, replaced):
    """Another writer may have made a new one, and locked that."""
    before, take = len(os.listdir("/proc/self/fd")), fcntl.flock

    def removed(fd, how):
        take(fd, how)
        (disk.root / "lock").unlink()
        if replaced:
            (disk.root / "lock").touch()

    monkeypatch.setattr(fcntl, "flock", removed)
    with pytest.raises(StaleCommit):
        disk.lock("lock", {})
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_open_files_have_their_own_advice(disk, monkeypatch):
    disk.write_bytes("file", b"content")
    monkeypatch.setattr(os, "open", broken(errno.EMFILE))
    for call in (disk.open, disk.read_bytes, lambda path: disk.sync(path, why="test")):
        with pytest.raises(DiskFailed, match="ulimit -n"):
            call("file")


def test_another_process_is_kept_out(disk):
    """For real: the holder is a process, and when it is killed the lock is free."""
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print(1, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(disk.root / "lock")], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(RunLocked):
        disk.lock("lock", {})
    holder.kill()
    holder.communicate()
    disk.lock("lock", {}).release()


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(disk):
    """As a data loader's workers are, for seconds, after their trainer was killed."""
    code = (
        "import os, sys, time; from holdfast.store.disk import Disk; disk = Disk(sys.argv[1]);"
        "lock = disk.lock('lock', {'pid': os.getpid(), 'host': 'here'}); child = os.fork();"
        "child or lock.release();"
        "os.write(1, f'{child or \"child\"}\\n'.encode());"  # in one piece: both write
        "time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(disk.root)], stdout=subprocess.PIPE, env=env, text=True
    )
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    (child,) = lines - {"child"}
    try:
        with pytest.raises(RunLocked, match=f"process {parent.pid} on here"):
            disk.lock("lock", {})
        parent.kill()
        parent.wait()
        disk.lock("lock", {}).release()
    finally:
        os.kill(int(child), signal.SIGKILL)
        parent.stdout.close()


def test_a_place_that_cannot_be_made_is_bad_input():
    with pytest.raises(BadInput, match="cannot be used as a directory: No such file or directory"):
        Disk("/proc/holdfast").makedirs("")
