"""Segments over several drives: every byte in one place, in proportion, and read back whatever else is wrong."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.errors import Damaged, DiskFailed, DiskFull, FileMissing, RunMismatch
from holdfast.io.buffers import Buffer
from holdfast.io.queue import DriveQueues, IOQueue
from holdfast.store.commit.housekeeping import sweep
from holdfast.store.disk import Disk
from holdfast.store.drive_links import Drive
from holdfast.store.format.manifest import CommitRef, seal
from holdfast.store.log import journal, striping
from holdfast.store.log import segments as log
from holdfast.store.log.journal import JournalWriter, Record
from holdfast.store.log.segments import SegmentRef, read_segment, segments, stripe_paths, trim
from holdfast.store.log.striping import (
    Stripes,
    make_segment,
    open_segment,
    remove_segment,
    segment_bytes,
    segment_paths,
)
from support.journal_records import PAGE, TIMELINE, payload, record

STREAM = "rank-00000"
FOLDERS = ("data/drive_1", "data/drive_2")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(striping, "STRIPE_BYTES", PAGE)


@pytest.fixture
def queue():
    queue = DriveQueues([], threads=2)
    yield queue
    queue.close()


def drives(*shares):
    return [Drive("data" if not n else f"data/drive_{n}", "", 1, share) for n, share in enumerate(shares)]


def disk_in(root):
    disk = Disk(root)
    for folder in FOLDERS:
        disk.makedirs(folder)
    return disk


def written(root, queue, groups, shares=(0.25, 0.5, 0.25), **options):
    disk = disk_in(root)
    queue.add([disk.root / folder for folder in FOLDERS])
    writer = JournalWriter(disk, queue, STREAM, TIMELINE, stripes=Stripes.over(drives(*shares)), **options)
    for group in groups:
        writer.append(group)
    writer.close()
    return disk


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_of_a_segment_has_one_place(seed):
    rng = random.Random(seed)
    shares = [rng.random() for _ in range(rng.randint(2, 5))]
    stripes = Stripes.over(drives(*(share / sum(shares) for share in shares)))
    nbytes = rng.randrange(0, 300 * PAGE, PAGE)
    ends = [PAGE, *(0 for _ in stripes.folders)]
    start = 0
    while start < nbytes:
        stop = min(nbytes, start + rng.randint(1, 9 * PAGE))
        for file, offset, length in stripes.pieces(start, stop):
            assert offset == ends[file], "in order, and without a hole"
            ends[file] += length
        start = stop
    assert ends == stripes.sizes(nbytes) and sum(ends) == nbytes + PAGE
    assert stripes.whole_bytes(ends) == nbytes
    cut = rng.randrange(len(ends))
    ends[cut] = rng.randrange(0, ends[cut] + 1)
    whole = stripes.whole_bytes(ends)
    least = [max(PAGE, ends[0]), *ends[1:]]
    assert all(size <= end for size, end in zip(stripes.sizes(whole), least, strict=True))
    assert any(size > end for size, end in zip(stripes.sizes(whole + 1), ends, strict=True))
    assert stripes.decode(stripes.encode(), "a") == stripes


@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.2, 0.3, 0.5), (1 / 3, 1 / 3, 1 / 3), (0.0, 0.4, 0.6), (0.1, 0.9)]
)
def test_stripes_go_round_in_proportion(shares):
    stripes = Stripes.over(drives(*shares))
    sizes = stripes.sizes(10_000 * PAGE)
    sizes[0] -= PAGE
    for share, size in zip(shares, sizes, strict=True):
        assert size / sum(sizes) == pytest.approx(share, abs=0.02)


def test_a_run_on_one_drive_has_no_stripes():
    assert (
        Stripes.over([]) is None
        and Stripes.over(drives(1.0)) is None
        and Stripes.over(drives(1.0, 0.0)) is None
    )


@pytest.mark.parametrize("sizes", [(), (PAGE,), (PAGE, 7 * PAGE), (3 * PAGE, 1024 * PAGE + PAGE)])
def test_records_read_back_from_all_drives(tmp_path, queue, sizes):
    groups = [[record(11, sizes)], [record(12, sizes), record(13, sizes)]]
    disk = written(tmp_path, queue, groups)
    [ref] = segments(disk, STREAM)
    found, odd = read_segment(disk, ref)
    assert odd is None
    for stored, given in zip(found, [r for g in groups for r in g], strict=True):
        assert (stored.step, payload(disk, queue, stored)) == (given.step, b"".join(given.parts))
    assert [path.partition("/step")[0] for path in segment_paths(disk, ref.path)] == [
        f"journal/{STREAM}", f"data/drive_1/{STREAM}.step-000000000011.t0003.log",
        f"data/drive_2/{STREAM}.step-000000000011.t0003.log",
    ]  # fmt: skip
    assert stripe_paths(disk) == segment_paths(disk, ref.path)[1:]
    if sizes:
        moved = queue.counters()["write", "records", "journal"]
        assert moved == sum(len(part) for g in groups for r in g for part in r.parts) + 3 * PAGE


def test_records_are_synced_on_every_drive_that_has_some(tmp_path, queue, monkeypatch):
    synced, sync = [], Disk.sync

    def noting(disk, target, *, why):
        if why == "records":
            synced.append(str(target.path.relative_to(disk.root).parent))
        return sync(disk, target, why=why)

    monkeypatch.setattr(Disk, "sync", noting)
    written(tmp_path, queue, [[record(11, (40 * PAGE,))]])
    assert sorted(synced) == ["data/drive_1", "data/drive_2", f"journal/{STREAM}"]


@pytest.mark.parametrize("number", range(3))
def test_a_flipped_bit_on_any_drive_is_found(tmp_path, queue, number):
    disk = written(tmp_path, queue, [[record(11, (16 * PAGE,))], [record(12, (16 * PAGE,))]])
    [ref] = segments(disk, STREAM)
    second = read_segment(disk, ref)[0][1]
    path = segment_paths(disk, ref.path)[number]
    _, offset, _ = next(
        p for p in second.stripes.pieces(second.offset + second.header_bytes, second.end) if p[0] == number
    )
    with open(tmp_path / path, "r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)
        file.seek(offset + 5)
        file.write(bytes([byte[0] ^ 4]))
    found, _ = read_segment(disk, ref)
    payload(disk, queue, found[0])
    with pytest.raises(Damaged, match="record of step 12 fails its checksum"):
        payload(disk, queue, found[1])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_file_that_is_gone_is_named_and_the_records_before_are_not_given_out(tmp_path, queue, lost):
    disk = written(tmp_path, queue, [[record(11, (16 * PAGE,))]])
    [ref] = segments(disk, STREAM)
    path = segment_paths(disk, ref.path)[1 + lost]
    (tmp_path / path).unlink()
    found, odd = read_segment(disk, ref)
    assert found == [] and isinstance(odd, FileMissing) and path in str(odd)


def test_a_segment_that_its_writer_removes_is_no_damage(tmp_path, queue):
    disk = written(tmp_path, queue, [[record(11, (16 * PAGE,))]])
    [ref] = segments(disk, STREAM)
    stored = read_segment(disk, ref)[0][0]
    assert segment_bytes(disk, ref.path) >= 18 * PAGE
    remove_segment(disk, ref.path)
    assert [*tmp_path.rglob("*.log")] == [] and read_segment(disk, ref) == ([], None)
    with pytest.raises(FileNotFoundError):
        open_segment(disk, stored.path, stored.stripes)


def test_files_of_stripes_without_their_segment_are_swept(tmp_path, queue):
    """A kill between the names of a segment, or a cut while one is removed."""
    disk = written(tmp_path, queue, [[record(11, (16 * PAGE,))]])
    mine = tmp_path / "data/drive_1" / f"{STREAM}.step-000000000011.notes"
    mine.write_text("mine")
    sweep(disk, {})
    assert len(stripe_paths(disk)) == 2
    (tmp_path / segments(disk, STREAM)[0].path).unlink()
    sweep(disk, {})
    assert [path for folder in FOLDERS for path in (tmp_path / folder).iterdir()] == [mine]


@pytest.mark.parametrize(
    "commit, later, stays",
    [
        (CommitRef(3, 10), None, True),
        (CommitRef(1, 10), 12, True),  # it ends with step 11
        (CommitRef(3, 11), 12, False),
        (CommitRef(3, 30), None, True),  # nothing says where it ends
        (CommitRef(4, 10), None, False),  # a commit needs no records of an earlier timeline
    ],
)
@pytest.mark.parametrize("is_readable", [True, False])
def test_stripes_stay_while_their_segment_may_be_put_back(tmp_path, queue, commit, later, stays, is_readable):
    disk = written(tmp_path, queue, [[record(11, (16 * PAGE,))]])
    (tmp_path / segments(disk, STREAM)[0].path).unlink()
    if later is not None:
        (tmp_path / SegmentRef(3, later, STREAM).path).write_bytes(b"")
    manifest = SimpleNamespace(oldest_step=commit.step) if is_readable else None
    sweep(disk, cast(Any, {commit: manifest}))
    assert len(stripe_paths(disk)) == (2 if stays or (manifest is None and commit.timeline == 3) else 0)


def test_stripes_without_a_byte_do_not_stay(tmp_path, queue):
    """A kill between the names of a segment."""
    disk = written(tmp_path, queue, [])
    stripes = Stripes.over(drives(0.25, 0.5, 0.25))
    make_segment(disk, path := SegmentRef(3, 11, STREAM).path, stripes, 32 * PAGE)
    disk.unlink(path)
    sweep(disk, {CommitRef(3, 10): None})
    assert stripe_paths(disk) == []


def test_zeros_at_the_end_of_records_stay_while_a_file_is_missing(tmp_path, queue):
    zeros = Buffer(16 * PAGE, "test").view
    zeros[:] = bytes(len(zeros))
    disk = written(tmp_path, queue, [[Record(11, {}, (zeros,))]])
    (missing, *_) = stripe_paths(disk)
    (tmp_path / missing).rename(tmp_path / "away")
    assert trim(disk, STREAM) == []
    (tmp_path / "away").rename(tmp_path / missing)
    [stored] = read_segment(disk, segments(disk, STREAM)[0])[0]
    assert payload(disk, queue, stored) == bytes(zeros)


def test_reserved_space_is_released_on_every_drive(tmp_path, queue):
    groups = [[record(11, (16 * PAGE,))], [record(12, (3 * PAGE,))]]
    disk = written(tmp_path, queue, groups)
    [ref] = segments(disk, STREAM)
    found, _ = read_segment(disk, ref)
    assert trim(disk, STREAM) == []
    ends = found[-1].stripes.sizes(found[-1].end)
    assert [disk.size(path) for path in segment_paths(disk, ref.path)] == ends
    assert read_segment(disk, ref) == (found, None)
    for stored, [given] in zip(found, groups, strict=True):
        assert payload(disk, queue, stored) == b"".join(given.parts)


def test_a_drive_without_room_for_a_whole_segment_gets_a_smaller_one(tmp_path, queue, monkeypatch):
    asked, allocate = [], Disk.allocate

    def full(disk, path, nbytes):
        asked.append(nbytes)
        if path.startswith("data/drive_2") and nbytes > 20 * PAGE:
            raise DiskFull("no room")
        allocate(disk, path, nbytes)

    monkeypatch.setattr(Disk, "allocate", full)
    disk = written(tmp_path, queue, [[record(11, (16 * PAGE,))]])
    [stored] = read_segment(disk, segments(disk, STREAM)[0])[0]
    assert len(payload(disk, queue, stored)) == 16 * PAGE and max(asked) > 20 * PAGE


def test_a_drive_that_fails_fails_the_write(tmp_path, queue, monkeypatch):
    sync = Disk.sync

    def failing(disk, target, *, why):
        if why == "records" and "drive_2" in str(target.path):
            raise DiskFailed("cannot sync")
        return sync(disk, target, why=why)

    monkeypatch.setattr(Disk, "sync", failing)
    with pytest.raises(DiskFailed, match="cannot sync"):
        written(tmp_path, queue, [[record(11, (16 * PAGE,))]])


def head(**other):
    table = {"bytes": PAGE, "folders": ["data/drive_1"], "order": [0, 1], **other}
    return seal({"bytes": PAGE, "format": "holdfast", "version": 2, "stripes": table}, PAGE)


@pytest.mark.parametrize(
    "other",
    [{"folders": ["/etc"]}, {"folders": ["data/.."]}, {"order": [0]}, {"order": [0, 2]}, {"bytes": 100}],
)
def test_a_page_that_names_other_places_is_damage(other):
    assert Stripes.decode(head(), "a") is not None
    with pytest.raises(Damaged, match="does not say any more on which drives"):
        Stripes.decode(head(**other), "a")


def test_a_first_page_with_a_flipped_bit_is_damage_and_no_other_segment_is(tmp_path, queue, monkeypatch):
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", 1)
    disk = written(tmp_path, queue, [[record(11)], [record(12)]])
    first, second = segments(disk, STREAM)
    data = bytearray((tmp_path / first.path).read_bytes())
    for at in (100, 2000, PAGE - 10):
        (tmp_path / first.path).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found, odd = read_segment(disk, first)
        assert found == [] and isinstance(odd, Damaged)
    assert [stored.step for stored in read_segment(disk, second)[0]] == [12]


def test_a_version_that_does_not_know_stripes_refuses_them(tmp_path, queue, monkeypatch):
    """It must not take the log for one that ends there."""
    disk = written(tmp_path, queue, [[record(11)]])
    monkeypatch.setattr(log, "find_segment", lambda disk, path: striping.SegmentFile(
        [disk.open(path, write=False, direct=False)], None, disk.size(path)))  # fmt: skip
    with pytest.raises(RunMismatch, match="use a newer one"):
        read_segment(disk, segments(disk, STREAM)[0])


def test_one_queue_takes_the_requests_of_all_drives(tmp_path):
    queue = IOQueue(2)
    try:
        disk = disk_in(tmp_path)
        writer = JournalWriter(disk, queue, STREAM, TIMELINE, stripes=Stripes.over(drives(0.5, 0.5)))
        writer.append([given := record(11, (9 * PAGE,))])
        writer.close()
        [stored] = read_segment(disk, segments(disk, STREAM)[0])[0]
        assert payload(disk, queue, stored) == b"".join(given.parts)
    finally:
        queue.close()
