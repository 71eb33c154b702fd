"""A unit writes and reads whole files, block by block, and hands out only what no commit needs."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import pytest
import safetensors
import xxhash

from holdfast.errors import ChunkCorrupt, DiskFull, PoolExhausted, RunMismatch
from holdfast.io.buffers import BufferPool
from holdfast.io.queue import IOQueue
from holdfast.store.commit.generations import Generations
from holdfast.store.disk import Disk
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, Layout

LARGE = Layout.build(
    [("a/param", "F32", (3,)), ("b/param", "F32", (1_300_021,)), ("c/param", "F32", (900_001,))]
)
HOW = {"kind": "state", "phase": "update", "priority": 1}


@pytest.fixture
def queue():
    queue = IOQueue(3)
    yield queue
    queue.close()


@pytest.fixture
def make(tmp_path, queue):
    """Makes units on a disk; ``make.retained`` are the files that commits name, with sizes."""
    disk = Disk(tmp_path)
    disk.makedirs("data")
    units = []

    def make(name="block_0", layout=LARGE, copies=3, grows=False, cuts=()):
        unit = Generations(name, layout, copies, disk=disk, queue=queue, retained=lambda: make.retained,
                           way_out=lambda path: "Step 7 does not use it.", grows=grows, cuts=cuts)  # fmt: skip
        units.append(unit)
        return unit

    make.retained = {}
    yield make
    for unit in units:
        unit.close()


def image_of(layout, seed=0):
    buffer = BufferPool().take(layout.file_bytes, "state")
    buffer.view[:] = random.Random(seed).randbytes(buffer.nbytes)
    return buffer.view


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 104729])
def test_what_is_written_is_read(make, count):
    unit = make(layout=Layout.build([("w/param", "U8", (count,))]))
    unit.create()
    generation, image = unit.acquire(), image_of(unit.layout)
    checksums = unit.write(generation, image, **HOW).result(30)
    copy = image_of(unit.layout, seed=1)
    unit.read(generation, copy, checksums, **HOW).result(30)
    assert copy == image


def test_the_file_is_safetensors_with_zero_filler_and_a_checksum_per_block(make, tmp_path):
    unit = make()
    unit.create()
    generation, image = unit.acquire(), image_of(LARGE)
    tensor = bytes(image[LARGE["b/param"].offset : LARGE["b/param"].end])
    checksums = unit.write(generation, image, **HOW).result(30)
    data = (tmp_path / unit.path(generation)).read_bytes()
    assert data == bytes(image) and len(data) == LARGE.file_bytes
    assert len(checksums) == 3
    assert checksums == tuple(
        xxhash.xxh3_64_hexdigest(data[start : start + CHECKSUM_BLOCK])
        for start in range(0, len(data), CHECKSUM_BLOCK)
    )
    theirs = dict(safetensors.deserialize(data))
    assert bytes(theirs["b/param"]["data"]) == tensor
    assert all(set(theirs[pad.key]["data"]) <= {0} for pad in LARGE.pads)


def test_every_generation_is_its_own_file_and_bytes_are_counted(make, queue):
    unit = make()
    unit.create()
    generations = [unit.acquire() for _ in range(3)]
    assert generations == [0, 1, 2]
    futures = [unit.write(g, image_of(LARGE, seed=g), **HOW) for g in generations]
    checksums = [future.result(30) for future in futures]
    assert len(set(checksums)) == 3
    assert queue.counters() == {("write", "state", "update"): 3 * LARGE.file_bytes}
    assert unit.generation_of(unit.path(2)) == 2
    with pytest.raises(ValueError, match="no generation of the unit"):
        unit.generation_of("data/block_01.0.safetensors")


def test_acquire_passes_over_what_commits_name_and_what_is_out(make):
    unit = make()
    unit.create()
    make.retained = {unit.path(0): unit.layout.file_bytes}
    assert (unit.acquire(), unit.acquire()) == (1, 2)
    with pytest.raises(PoolExhausted, match="3 exist, 2 are being written"):
        unit.acquire()
    unit.release(2)
    assert unit.acquire() == 2


def test_damage_in_one_block_names_its_atoms_only(make, tmp_path):
    unit = make()
    unit.create()
    generation = unit.acquire()
    checksums = unit.write(generation, image_of(LARGE), **HOW).result(30)
    with open(tmp_path / unit.path(generation), "r+b") as file:
        file.seek(2 * CHECKSUM_BLOCK + 77)
        file.write(b"\x00\x01")
    with pytest.raises(ChunkCorrupt) as caught:
        unit.read(generation, image_of(LARGE), checksums, **HOW).result(30)
    error = caught.value
    assert (error.offset, error.atoms) == (2 * CHECKSUM_BLOCK, ("c/param",))
    assert f"expected xxh3:{checksums[2]}" in str(error) and "Step 7 does not use it." in str(error)


def test_only_what_was_acquired_is_written_and_images_have_the_files_size(make):
    unit = make()
    unit.create()
    with pytest.raises(ValueError, match="generation 0 of unit 'block_0' was not acquired"):
        unit.write(0, image_of(LARGE), **HOW)
    with pytest.raises(ValueError, match="the image given has 4096"):
        unit.write(unit.acquire(), image_of(LARGE)[:4096], **HOW)


def test_a_write_counts_as_synced_until_the_generation_is_acquired_anew(make):
    unit = make()
    unit.create()
    generation = unit.acquire()
    assert not unit.is_synced(generation, ())
    checksums = unit.write(generation, image_of(LARGE), **HOW).result(30)
    assert unit.is_synced(generation, checksums)
    assert not unit.is_synced(generation, checksums[:-1])
    unit.release(generation)
    assert unit.acquire() == generation
    assert not unit.is_synced(generation, checksums)


def test_create_keeps_files_of_the_right_size_and_says_what_is_missing(make, tmp_path):
    unit = make()
    assert unit.missing_bytes() == 3 * LARGE.file_bytes
    unit.create()
    path = tmp_path / unit.path(1)
    path.write_bytes(b"x" * LARGE.file_bytes)
    (tmp_path / unit.path(2)).write_bytes(b"short")
    assert unit.missing_bytes() == LARGE.file_bytes
    unit.create()
    assert path.read_bytes()[:5] == b"xxxxx"
    assert (tmp_path / unit.path(2)).stat().st_size == LARGE.file_bytes


def test_files_beyond_the_copies_go_when_no_commit_needs_them(make, tmp_path):
    make().create()
    (tmp_path / "data/block_0.old.9.safetensors").write_bytes(b"of another unit")
    unit = make(copies=1)
    make.retained = {unit.path(2): unit.layout.file_bytes}
    unit.create()
    names = [unit.path(0), unit.path(2), "data/block_0.old.9.safetensors"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [name[5:] for name in names]
    make.retained = {unit.path(0): unit.layout.file_bytes}
    unit.trim()
    assert not (tmp_path / unit.path(2)).exists()


def test_a_file_of_a_commit_that_was_cut_is_made_anew(make, tmp_path):
    unit = make()
    unit.create()
    make.retained = {unit.path(0): unit.layout.file_bytes}
    (tmp_path / unit.path(0)).write_bytes(b"cut")
    assert unit.missing_bytes() == LARGE.file_bytes
    unit.create()
    assert (tmp_path / unit.path(0)).stat().st_size == LARGE.file_bytes


def test_files_of_another_model_are_refused_not_overwritten(make, tmp_path):
    unit = make()
    unit.create()
    make.retained = {unit.path(0): unit.layout.file_bytes}
    other = make(layout=Layout.build([("w/param", "F32", (5,))]))
    with pytest.raises(RunMismatch, match="the run holds another model"):
        other.create()
    assert (tmp_path / unit.path(0)).stat().st_size == LARGE.file_bytes
    with pytest.raises(RunMismatch, match="3 blocks, this layout has 1"):
        other.read(0, image_of(other.layout), ("", "", ""), **HOW)


def test_names_are_safe_in_a_directory(make):
    for name in ["", "a/b", "../a", ".hidden", "a b"]:
        with pytest.raises(ValueError, match="a unit's name is letters"):
            make(name)


def test_no_room_for_the_files_is_said_before_anything_is_written(make, monkeypatch):
    import errno
    import os

    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match=f"{LARGE.file_bytes} bytes .* are needed for block_0.0.safetensors"):
        make().create()


SMALL = Layout.build([("w/param", "F32", (100,))])


def written(unit, generation):
    checksums = unit.write(generation, image_of(unit.layout, generation), **HOW).result(30)
    unit.release(generation)
    return checksums


def files_of(tmp_path):
    return sorted(int(path.name.split(".")[1]) for path in (tmp_path / "data").iterdir())


def test_a_unit_that_grows_has_a_file_for_each_commit_and_one_to_write(make, tmp_path):
    unit = make(layout=SMALL, copies=1, grows=True)
    unit.create()
    for generation in range(4):
        taken = unit.acquire() if generation == 0 else unit.acquire_new()
        assert taken == generation
        written(unit, taken)
        make.retained[unit.path(taken)] = SMALL.file_bytes
    for gone in (1, 2):
        del make.retained[unit.path(gone)]
    unit.trim()
    assert files_of(tmp_path) == [0, 1, 3]  # one is free
    again = make(layout=SMALL, copies=1, grows=True)
    again.create()  # another process finds them, in whatever order they were made
    assert files_of(tmp_path) == [0, 1, 3] and again.acquire() == 1


def test_a_file_that_went_and_was_made_again_is_another_one(make):
    unit = make(layout=SMALL, copies=1, grows=True)
    unit.create()
    make.retained[unit.path(unit.acquire())] = SMALL.file_bytes
    for _ in range(2):
        written(unit, unit.acquire_new())
        unit.acquire_new()
        written(unit, 2)
        unit.trim()
        assert unit.acquire() == 1
        unit.release(1)
        unit._surplus.discard(1)


def test_a_file_written_through_is_that_of_a_write(make):
    unit = make()
    unit.create()
    image, generation = image_of(LARGE), unit.acquire()
    beats = []
    whole = unit.write(generation, image, **HOW).result(30)

    def fill(view, start):
        view[:] = image[start : start + len(view)]

    other = unit.acquire()
    assert unit.write_through(other, fill, phase="update", priority=1, beat=lambda: beats.append(1)) == whole
    assert unit.is_synced(other, whole) and len(beats) == len(whole) == 3
    copy = image_of(LARGE, seed=1)
    unit.read(other, copy, whole, **HOW).result(30)
    assert copy == image


def test_a_write_through_that_fails_leaves_nothing_under_way(make):
    unit = make()
    unit.create()

    def fill(view, start):
        if start:
            raise KeyError("gone")

    with pytest.raises(KeyError):
        unit.write_through(unit.acquire(), fill, phase="update", priority=1)
    with pytest.raises(ValueError, match="was not acquired"):
        unit.write_through(2, fill, phase="update", priority=1)


def test_a_file_is_not_removed_under_a_thread_that_has_acquired_it(make, monkeypatch):
    unit = make(layout=SMALL, copies=1, grows=True)
    unit.create()
    make.retained[unit.path(unit.acquire())] = SMALL.file_bytes
    for _ in range(4):
        unit.acquire_new()
    for generation in range(1, 5):
        unit.release(generation)
    taken, real = [], unit._disk.unlink

    def take():
        with suppress(PoolExhausted):
            while True:
                taken.append(unit.acquire())

    thread = threading.Thread(target=take)

    def unlink(path):
        if not thread.ident:
            thread.start()
            thread.join(0.2)
        real(path)

    monkeypatch.setattr(unit._disk, "unlink", unlink)
    unit.trim()
    thread.join()
    assert taken and all(unit._disk.exists(unit.path(generation)) for generation in taken)


CUTS = (4096, CHECKSUM_BLOCK + 8192)
"""Offsets between which parts of a file are read: a page into the first block, and two into the second."""


def room(nbytes):
    return BufferPool().take(nbytes, "state").view


def test_a_part_between_cuts_is_read_by_itself(make):
    unit, image = make(cuts=CUTS), image_of(LARGE)
    unit.create()
    unit.acquire()
    checksums = unit.write(0, image, **HOW).result()
    ends = (0, *CUTS, LARGE.file_bytes)
    for first, start in enumerate(ends):
        for stop in ends[first + 1 :]:
            found = room(stop - start)
            unit.read(0, found, checksums, start=start, **HOW).result()
            assert found == image[start:stop], (start, stop)


def test_a_part_is_verified_once_the_whole_file_was_read(make, tmp_path):
    """What one object has written, another reads whole before it reads parts; a file that is written anew counts."""
    unit, image = make(cuts=CUTS), image_of(LARGE)
    unit.create()
    unit.acquire()
    checksums = unit.write(0, image, **HOW).result()
    other, part = make(cuts=CUTS), room(CUTS[1] - CUTS[0])
    with pytest.raises(ValueError, match="do not end at cuts, or the file was not written or read whole"):
        other.read(0, part, checksums, start=CUTS[0], **HOW)
    other.read(0, room(LARGE.file_bytes), checksums, **HOW).result()
    other.read(0, part, checksums, start=CUTS[0], **HOW).result()
    assert part == image[CUTS[0] : CUTS[1]]
    path = tmp_path / other.path(0)
    for offset in (CUTS[0], CUTS[1] - 1):
        spoiled = bytearray(path.read_bytes())
        spoiled[offset] ^= 1
        path.write_bytes(spoiled)
        with pytest.raises(ChunkCorrupt):
            other.read(0, part, checksums, start=CUTS[0], **HOW).result()
        spoiled[offset] ^= 1
        path.write_bytes(spoiled)
    other.acquire()
    with pytest.raises(ValueError, match="not written or read whole"):
        other.read(0, part, checksums, start=CUTS[0], **HOW)


@pytest.mark.parametrize("start, stop", [(0, 8192), (4096, 8192), (8192, LARGE.file_bytes)])
def test_what_does_not_begin_and_end_at_a_cut_is_refused(make, start, stop):
    unit = make(cuts=CUTS)
    unit.create()
    unit.acquire()
    checksums = unit.write(0, image_of(LARGE), **HOW).result()
    with pytest.raises(ValueError, match="read by themselves"):
        unit.read(0, room(stop - start), checksums, start=start, **HOW)
