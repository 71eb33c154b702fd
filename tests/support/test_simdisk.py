"""The simulated disk loses, keeps and tears what a power cut may, and nothing else."""

from __future__ import annotations

import random

import pytest

from holdfast.errors import DiskFailed, RunLocked, StaleCommit
from support.powerloss import SECTOR
from support.simdisk import SimDisk


def images_at_the_end(disk, **options):
    """The images of a power cut after the last operation."""
    return list(disk.images(random.Random(0), start=len(disk.log), **options))


def contents(images, path):
    """What ``path`` may hold; None where it is absent."""
    return {image.disk.read_bytes(path) if image.disk.exists(path) else None for image in images}


@pytest.fixture
def disk():
    disk = SimDisk()
    disk.makedirs("d")
    return disk


def test_the_live_view_is_an_ordinary_file_system(disk):
    disk.write_bytes("d/a", b"one")
    disk.rename("d/a", "d/b")
    assert disk.listdir("d") == ["b"]
    assert disk.read_bytes("d/b") == b"one"
    assert (disk.exists("d/a"), disk.exists("d/b"), disk.size("d/b")) == (False, True, 3)
    disk.unlink("d/b")
    disk.unlink("d/b")
    assert disk.listdir("d") == disk.listdir("absent") == []
    for path in ("d/b", "absent/b"):
        with pytest.raises(FileNotFoundError):
            disk.open(path)


def test_unsynced_writes_may_be_there_or_not_and_synced_ones_are(disk):
    disk.write_bytes("d/a", b"old")
    disk.sync("d/a", why="x")
    disk.sync_dir("d", why="x")
    assert contents(images_at_the_end(disk), "d/a") == {b"old"}
    disk.open("d/a").write(memoryview(b"new"), 0)
    assert contents(images_at_the_end(disk), "d/a") == {b"old", b"new"}
    disk.sync("d/a", why="x")
    assert contents(images_at_the_end(disk), "d/a") == {b"new"}


def test_a_synced_file_without_its_directory_may_have_no_name(disk):
    disk.write_bytes("d/a", b"data")
    disk.sync("d/a", why="x")
    assert contents(images_at_the_end(disk), "d/a") == {None, b"data"}


def test_the_dangerous_case_a_name_without_its_bytes(disk):
    disk.write_bytes("d/a.tmp", b"data")
    disk.rename("d/a.tmp", "d/a")
    disk.sync_dir("d", why="x")
    assert contents(images_at_the_end(disk), "d/a") == {b"", b"data"}


def test_a_rename_is_all_or_nothing(disk):
    disk.write_bytes("d/a", b"old")
    disk.write_bytes("d/b", b"new")
    for path in ("d/a", "d/b"):
        disk.sync(path, why="x")
    disk.sync_dir("d", why="x")
    disk.rename("d/b", "d/a")
    views = {(image.disk.read_bytes("d/a"), image.disk.exists("d/b")) for image in images_at_the_end(disk)}
    assert views == {(b"old", True), (b"new", False)}


def test_an_unsynced_unlink_may_be_undone(disk):
    disk.write_bytes("d/a", b"data")
    disk.sync("d/a", why="x")
    disk.sync_dir("d", why="x")
    disk.unlink("d/a")
    assert contents(images_at_the_end(disk), "d/a") == {None, b"data"}
    disk.sync_dir("d", why="x")
    assert contents(images_at_the_end(disk), "d/a") == {None}


def test_a_torn_write_has_whole_sectors_of_either_kind(disk):
    disk.write_bytes("d/a", b"o" * 4 * SECTOR)
    disk.sync("d/a", why="x")
    disk.sync_dir("d", why="x")
    disk.open("d/a").write(memoryview(b"n" * 4 * SECTOR), 0)
    torn = contents(images_at_the_end(disk, samples=200), "d/a")
    assert len(torn) > 8
    for data in torn:
        assert all(len(set(data[at : at + SECTOR])) == 1 for at in range(0, len(data), SECTOR))


def test_a_directory_whose_name_is_lost_takes_its_files_along(disk):
    disk.write_bytes("d/a", b"data")
    disk.sync("d/a", why="x")
    disk.sync_dir("d", why="x")
    assert None in contents(images_at_the_end(disk, without="makedirs"), "d/a")


def test_leaving_out_a_sync_by_its_reason(disk):
    disk.write_bytes("d/a", b"data")
    disk.sync("d/a", why="data")
    disk.sync_dir("d", why="name")
    assert disk.whys() == ["makedirs", "data", "name"]
    assert contents(images_at_the_end(disk, without="data"), "d/a") == {b"", b"data"}
    assert contents(images_at_the_end(disk, without="name"), "d/a") == {None, b"data"}


def test_images_carry_the_newest_acknowledgement(disk):
    start = len(disk.log)
    disk.write_bytes("d/a", b"1")
    disk.ack(1)
    disk.write_bytes("d/a", b"2")
    acked = {image.position: image.acked for image in disk.images(random.Random(0), start=start)}
    position = next(index for index, operation in enumerate(disk.log) if operation.verb == "ack")
    assert all(value == (1 if at > position else None) for at, value in acked.items())


def test_an_image_is_a_disk_of_its_own(disk):
    disk.write_bytes("d/a", b"data")
    (image, *_) = images_at_the_end(disk)
    image.disk.makedirs("d")
    image.disk.write_bytes("d/b", b"more")
    assert image.disk.read_bytes("d/b") == b"more"
    assert disk.listdir("d") == ["a"]


def test_reads_beyond_the_end_and_second_writers_fail(disk):
    disk.write_bytes("d/a", b"data")
    with pytest.raises(DiskFailed, match="wanted 10, got 4"):
        disk.open("d/a").read(memoryview(bytearray(10)), 0)
    lock = disk.lock("lock", {})
    with pytest.raises(RunLocked):
        disk.lock("lock", {})
    lock.check()
    lock.release()
    with pytest.raises(StaleCommit):
        lock.check()
    disk.lock("lock", {})
