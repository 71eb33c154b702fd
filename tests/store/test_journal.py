"""The journal: what was appended is read back, whatever is wrong with what follows it."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from combined import some_of
from holdfast.errors import ChunkCorrupt, Damaged, DiskFull
from holdfast.io.buffers import Buffer
from holdfast.quantities import MiB
from holdfast.store.disk import Disk
from holdfast.store.format.manifest import Timeline
from holdfast.store.log import journal
from holdfast.store.log.chain import Chain
from holdfast.store.log.journal import JournalWriter, Record
from holdfast.store.log.segments import read_segment, segments, trim
from support.journal_records import PAGE, TIMELINE, part, payload, record, written


@pytest.mark.parametrize("sizes", [(), (PAGE,), (PAGE, 3 * PAGE), (PAGE, 4 * 1024 * PAGE + PAGE)])
def test_records_read_back(tmp_path, queue, sizes):
    groups = [[record(11, sizes)], [record(12, sizes), record(13, sizes)]]
    disk = written(tmp_path, queue, groups)
    [ref] = segments(disk, "s")
    found, odd = read_segment(disk, ref)
    assert odd is None
    assert [(stored.step, stored.about) for stored in found] == [(r.step, r.about) for g in groups for r in g]
    for stored, given in zip(found, [r for g in groups for r in g], strict=True):
        assert payload(disk, queue, stored) == b"".join(given.parts)
    assert [stored.previous for stored in found] == [TIMELINE.key, found[0].digest, found[1].digest]


def test_a_group_that_does_not_fit_begins_a_segment(tmp_path, queue, monkeypatch):
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", 2)
    disk = written(tmp_path, queue, [[record(step)] for step in range(11, 16)] + [[record(16, (64 * PAGE,))]])
    refs = segments(disk, "s")
    assert [ref.first_step for ref in refs] == [11, 13, 15, 16]
    chain = [stored for ref in refs for stored in read_segment(disk, ref)[0]]
    assert [stored.step for stored in chain] == list(range(11, 17))
    assert [b.previous for b in chain[1:]] == [a.digest for a in chain[:-1]]


@pytest.mark.parametrize("cut", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 4 * PAGE - 1])
def test_a_segment_cut_anywhere_keeps_the_records_before(tmp_path, queue, cut):
    """As if the last group had been on its way."""
    disk = written(tmp_path, queue, [[record(11), record(12)], [record(13)]])
    [ref] = segments(disk, "s")
    last = read_segment(disk, ref)[0][-1]
    path = tmp_path / ref.path
    data = bytearray(path.read_bytes())
    data[last.offset + cut :] = bytes(len(data) - last.offset - cut)  # the file keeps its size
    path.write_bytes(data)
    found, odd = read_segment(disk, ref)
    if cut >= PAGE:  # the header is whole
        with pytest.raises(ChunkCorrupt, match=r"record of step 13 .* Step 12 is the newest"):
            payload(disk, queue, found.pop())
    else:
        assert (odd is None) == (cut == 0)
    assert [stored.step for stored in found] == [11, 12]
    for stored in found:
        payload(disk, queue, stored)


@pytest.mark.slow
def test_every_flipped_bit_is_found(tmp_path, queue):
    """In a header it ends the reading there, in a payload it is told with its place."""
    disk = written(tmp_path, queue, [[record(11), record(12)], [record(13)]])
    [ref] = segments(disk, "s")
    whole, _ = read_segment(disk, ref)
    path, chance = tmp_path / ref.path, random.Random(0)
    good = path.read_bytes()
    for _ in some_of(4, range(1000)):
        data, place = bytearray(good), chance.randrange(whole[-1].end)
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        hit = next(stored for stored in whole if place < stored.end)
        found, odd = read_segment(disk, ref)
        if place < hit.offset + hit.header_bytes:
            assert isinstance(odd, Damaged) and odd.offset == hit.offset
            assert [stored.step for stored in found] == list(range(11, hit.step))
        else:
            assert odd is None
            with pytest.raises(ChunkCorrupt) as caught:
                payload(disk, queue, found[hit.step - 11])
            assert caught.value.offset <= place < caught.value.offset + caught.value.nbytes


@pytest.mark.parametrize("zeros", [False, True])
def test_what_follows_is_told_unless_it_is_zeros(tmp_path, queue, zeros):
    disk = written(tmp_path, queue, [[record(11)]])
    [ref] = segments(disk, "s")
    end = read_segment(disk, ref)[0][-1].end
    with open(tmp_path / ref.path, "r+b") as file:
        file.seek(end)
        file.write(bytes(PAGE) if zeros else b"x" * PAGE)
    found, odd = read_segment(disk, ref)
    assert [stored.step for stored in found] == [11]
    assert (odd is None) == zeros


def test_a_failed_write_ends_the_segment_and_the_next_goes_to_another(tmp_path, queue, monkeypatch):
    disk = Disk(tmp_path)
    disk.makedirs("")
    writer = JournalWriter(disk, queue, "s", TIMELINE)
    writer.append([record(11)])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            writer.append([record(12)])
    writer.append([record(12)])
    writer.close()
    first, second = segments(disk, "s")
    assert [s.step for s in read_segment(disk, second)[0]] == [12]
    assert read_segment(disk, second)[0][0].previous == read_segment(disk, first)[0][0].digest


class Interrupted(Future):
    """A write that somebody waits for when Ctrl-C comes; it ends a moment later."""

    def __init__(self):
        super().__init__()
        threading.Timer(0.1, self.set_result, (None,)).start()

    def result(self, timeout=None):
        raise KeyboardInterrupt


def test_an_interrupt_closes_no_file_that_is_written_to(tmp_path, queue, monkeypatch):
    """Another file could get the number of its descriptor."""
    disk, write, ended = Disk(tmp_path), Interrupted(), []
    disk.makedirs("")
    writer = JournalWriter(disk, queue, "s", TIMELINE)
    monkeypatch.setattr(queue, "submit", lambda requests, **kinds: write)
    monkeypatch.setattr(writer, "close", lambda real=writer.close: (ended.append(write.done()), real()))
    with pytest.raises(KeyboardInterrupt):
        writer.append([record(11)])
    assert ended[-1]


def test_the_space_that_killed_writers_reserved_is_given_back(tmp_path):
    """And not a byte that any of them wrote, whole or torn."""
    disk = Disk(tmp_path)
    torn = b"\1" * 100
    for timeline in range(1, 6):
        disk.makedirs("journal/s")
        path = f"journal/s/step-{timeline:012d}.t{timeline:04d}.log"
        disk.allocate(path, 64 * MiB)
        with (tmp_path / path).open("r+b") as file:
            file.seek(timeline * 3 * 4096)
            file.write(torn)
    empty = "journal/s/step-000000000009.t0009.log"
    disk.allocate(empty, 2 * MiB)
    trim(disk, "s")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "journal" / "s").iterdir())]
    assert sizes == [(timeline * 3 + 1) * 4096 for timeline in range(1, 6)] + [0]
    assert all(torn in path.read_bytes() for path in (tmp_path / "journal" / "s").glob("*[1-5].log"))
    assert read_segment(disk, segments(disk, "s")[-1]) == ([], None)


@pytest.mark.parametrize("pages", [1, 2, 300])
def test_giving_back_space_leaves_a_record_that_ends_in_zeros(tmp_path, queue, pages):
    zeros = Buffer(pages * PAGE, "test").view
    disk = written(tmp_path, queue, [[record(11), Record(12, {}, (part(PAGE, 1), zeros))]])
    [ref] = segments(disk, "s")
    before = read_segment(disk, ref)
    trim(disk, "s")
    assert read_segment(disk, ref) == before and [stored.step for stored in before[0]] == [11, 12]
    assert disk.size(ref.path) == before[0][-1].end
    assert payload(disk, queue, before[0][-1]).endswith(bytes(pages * PAGE))


def test_a_segment_is_made_for_the_records_that_are_needed_at_once(tmp_path, queue):
    disk = Disk(tmp_path)
    sizes = []
    for number, ahead in enumerate((10, 20, 10_000), 1):
        writer = JournalWriter(disk, queue, "s", Timeline(number, key="k"))
        writer.records_ahead = ahead
        writer.append([record(11, (MiB,))])
        writer.close()
        sizes.append(disk.size(segments(disk, "s")[-1].path))
    assert sizes == [n * (MiB + PAGE) for n in (10, 20, 64)]


def test_where_a_segment_does_not_fit_records_are_written_as_long_as_they_do(tmp_path, queue):
    class Small(Disk):
        def allocate(self, path, nbytes):
            if nbytes > 3 * MiB:
                raise DiskFull("full")
            super().allocate(path, nbytes)

    disk = Small(tmp_path)
    writer = JournalWriter(disk, queue, "s", Timeline(1, key="k"))
    for step in (11, 12):
        writer.append([record(step, (MiB,))])
    with pytest.raises(DiskFull):
        writer.append([record(13, (4 * MiB,))])
    writer.close()
    found = [stored.step for ref in segments(disk, "s") for stored in read_segment(disk, ref)[0]]
    assert found == [11, 12]


def test_a_chain_that_is_cut_has_the_progress_of_its_new_end():
    base = SimpleNamespace(step=0, shares={}, progress_of=lambda stream: {"step": 0})
    records = [SimpleNamespace(step=step, about={"progress": {"step": step}}, path="") for step in (1, 2, 3)]
    chain = Chain(base, "rank-00000", records)
    assert chain.progress == {"step": 3}
    chain.cut_to(1)
    assert chain.progress == {"step": 1}
