"""Copies that a node keeps for its partner: durable when that is said, whole or absent, after any power cut."""

from __future__ import annotations

import random

import pytest

from holdfast.io.buffers import Buffer
from holdfast.quantities import PAGE
from holdfast.store.disk import Disk
from holdfast.store.share_places import PartnerFiles, copied_files, prune_copies, sweep_copies
from support.simdisk import SimDisk

NAME = "data/rank-00001.a." + "0" * 32 + ".safetensors"
OTHER = "data/rank-00001.a." + "1" * 32 + ".safetensors"
SEGMENT = "journal/rank-00001/step-000000000001.t0001.log"


def send(disk):
    """A segment in two groups, and files of two blocks from two ranks in turn. What is acknowledged is marked."""
    files = PartnerFiles(disk)
    files.write(SEGMENT, 4096, 0, memoryview(b"a" * 1024))
    files.sync(SEGMENT)
    disk.ack(("records", 1024))
    files.write(SEGMENT, 4096, 1024, memoryview(b"b" * 1024))
    files.sync(SEGMENT)
    disk.ack(("records", 2048))
    for start in (0, 2048):
        files.write(NAME + ".tmp", 4096, start, memoryview(b"c" * 2048))
        files.write(OTHER + ".tmp", 4096, start, memoryview(b"d" * 2048))
    files.finish(NAME)
    disk.ack(("file", 2048))
    files.finish(OTHER)
    files.close()


def images(disk, without=None):
    yield from disk.images(random.Random(1), without=without)


def wrong(image):
    """What of an image is not as it was acknowledged."""
    if image.acked is None:
        return None
    kind, records = image.acked
    expected = (b"a" * 1024 + b"b" * 1024)[:records]
    if not image.disk.exists(SEGMENT) or image.disk.read_bytes(SEGMENT)[:records] != expected:
        return "records"
    if kind == "file" and not image.disk.exists(NAME):
        return "file"
    if image.disk.exists(NAME) and image.disk.read_bytes(NAME) != b"c" * 4096:
        return "torn"
    return None


def test_what_is_acknowledged_survives_a_power_cut():
    disk = SimDisk()
    send(disk)
    assert [image.position for image in images(disk) if wrong(image)] == []
    assert disk.size(NAME) == 4096 and copied_files(disk) == {NAME: 4096, OTHER: 4096, SEGMENT: 4096}


@pytest.mark.parametrize(
    "why",
    ["partner's records", "partner's directory", "partner's data", "partner's data directory", "makedirs"],
)
def test_every_sync_is_needed(why):
    disk = SimDisk()
    send(disk)
    assert any(wrong(image) for image in images(disk, without=why))


def test_files_that_nothing_names_are_swept():
    disk = SimDisk()
    send(disk)
    PartnerFiles(disk).write(OTHER + ".tmp", 4096, 0, memoryview(b"d" * 4096))
    disk.write_bytes("data/mine.txt", b"of somebody else")
    sweep_copies(disk, {NAME})
    assert disk.listdir("data") == ["mine.txt", NAME.removeprefix("data/")]
    sweep_copies(disk, set())
    assert disk.listdir("data") == ["mine.txt"]


def test_segments_that_no_commit_needs_are_pruned():
    disk = SimDisk()
    send(disk)
    prune_copies(disk, [(0, None)], timeline=1)
    assert disk.exists(SEGMENT)  # the timeline appends to it
    prune_copies(disk, [(9, None)], timeline=2)
    assert not disk.exists(SEGMENT)


@pytest.mark.parametrize(
    "path", ["commits/step-000000000001.t0001.json", "../lock", "data/../../x", "data/a.safetensors"]
)
def test_a_path_that_no_copy_has_is_refused(path):
    with pytest.raises(ValueError, match="no path of a copy"):
        PartnerFiles(SimDisk()).write(path, 4096, 0, memoryview(b"a"))


@pytest.mark.parametrize("direct", [True, False])
def test_copies_pass_the_page_cache_where_direct_io_is_allowed(tmp_path, direct):
    """All sizes are whole pages, and so is the memory that a rank receives in."""
    opened, disk = [], Disk(tmp_path)
    disk.open = lambda path, **how: opened.append(Disk.open(disk, path, **how)) or opened[-1]
    files, data = PartnerFiles(disk, direct), Buffer(2 * PAGE, "copy").view
    data[:] = bytes(range(256)) * 32
    for path, half in ((SEGMENT, SEGMENT), (NAME, NAME + ".tmp")):
        files.write(half, 3 * PAGE, PAGE, data)
        assert [file.direct for file in opened] == [direct] * len(opened)
        files.finish(NAME) if half != path else files.sync(path)
        assert disk.read_bytes(path)[PAGE:] == bytes(data)
    assert len(opened) == 2
    files.close()
