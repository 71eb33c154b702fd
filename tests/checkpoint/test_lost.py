"""What is lost with a small file of a run, removed or damaged: no more than it must be, and never without a word."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from torch import nn

from checkpoint.loops import same
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpointer import Checkpointer
from holdfast.errors import Unreadable
from holdfast.events import read_events
from holdfast.store.disk import Disk
from holdfast.store.log import journal
from holdfast.store.log.chain import read_journal
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.run_store import LocalStore
from test_checkpointer import go_on, reference, start


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """A base is of several units, one of them in each step; a segment holds one group."""
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 100)
    monkeypatch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 1)
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", 1)


def trained(root, steps, **options):
    """Resume and train to ``steps``; the step resumed from, and the state there."""
    loop, checkpointer = start(root, **options)
    with checkpointer:
        found = checkpointer.resume(), loop.state()
        for i in range(checkpointer.steps_done, steps):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
    return found


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("harm", [flip, remove])
@pytest.mark.parametrize("resumes", [1, 3])
def test_a_lost_timeline_record_loses_no_step(tmp_path, harm, resumes):
    """Of timelines that have records and no base yet."""
    states, _ = reference(6 + 3 * resumes)
    trained(tmp_path, 6, base_every=1000)
    for number in range(resumes):
        trained(tmp_path, 9 + 3 * number, base_every=1000)
    for number in range(2, 2 + resumes):
        harm(tmp_path / "timelines" / f"t{number:04d}.json")
    step, state = trained(tmp_path, 0)
    assert step == 6 + 3 * resumes and same(state, states[step])
    with LocalStore.read(tmp_path) as reader:
        records, damaged = reader.timelines()
    assert not damaged and records[2].parent == 1  # written anew
    assert [records[n].fork_step for n in sorted(records)][1:] == [*range(6, step + 1, 3)]


def test_no_two_timelines_have_one_number(tmp_path):
    """Nothing but the name of a segment tells of the second one."""
    trained(tmp_path, 6, base_every=1000)
    trained(tmp_path, 9, base_every=1000)
    remove(tmp_path / "timelines" / "t0002.json")
    for ref in segments(Disk(tmp_path), "rank-00000"):
        if ref.timeline == 2:
            (tmp_path / ref.path).write_bytes(b"\xff" * 8192)
    trained(tmp_path, 8, base_every=1000)
    with LocalStore.read(tmp_path) as reader:
        assert sorted(reader.timelines()[0]) == [1, 3]


@pytest.mark.parametrize("harm", [flip, remove])
@pytest.mark.slow
def test_the_index_of_a_base_is_of_that_base_alone(tmp_path, harm):
    states, _ = reference(60)
    trained(tmp_path, 60, base_every=10)
    with LocalStore.read(tmp_path) as reader:
        newest = reader.load(reader.line()[0])
    harm(tmp_path / newest.index["path"])
    with pytest.warns(UserWarning, match="index of step"):
        step, state = trained(tmp_path, 0)
    assert step == 60 and same(state, states[60])
    assert len(list((tmp_path / "index").iterdir())) <= 2


def test_a_segment_that_is_missing_among_others_is_told_of(tmp_path):
    states, _ = reference(12)
    trained(tmp_path, 12, base_every=1000)
    [*_, wanted] = [ref for ref in segments(Disk(tmp_path), "rank-00000") if ref.first_step <= 7]
    assert read_segment(Disk(tmp_path), wanted)[0]
    remove(tmp_path / wanted.path)
    with pytest.warns(UserWarning, match=f"no record of step {wanted.first_step} .* a segment was removed"):
        step, state = trained(tmp_path, 0)
    assert step == wanted.first_step - 1 and same(state, states[step])


def test_a_record_that_ends_with_zeros_is_not_taken_for_the_space_behind_it(tmp_path):
    """The gradient of the last parameter is zero: pages of zeros, which belong to the record."""

    def run(steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(100, 100))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
            done = checkpointer.resume()
            for _ in range(done, steps):
                (model[0](torch.ones(3)).sum() + 0 * model[1](torch.ones(100)).sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
        return done

    assert [run(2), run(4), run(4), run(4)] == [0, 2, 4, 4]


@pytest.fixture
def unread(monkeypatch):
    """Makes the device give back nothing of a file, until that is undone."""
    real, broken = os.preadv, set()

    def read(fd, *rest):
        if os.readlink(f"/proc/self/fd/{fd}") in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", read)
    yield lambda *paths: broken.update(map(str, paths))
    monkeypatch.undo()


def segment_with(root, step):
    return root / [ref for ref in segments(Disk(root), "rank-00000") if ref.first_step <= step][-1].path


def with_bases(root, steps=45):
    """A run of so many steps with bases of steps 20 and 40."""
    loop, checkpointer = start(root, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        for i in range(steps):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
            if checkpointer.steps_done in (20, 40):
                checkpointer.save()


def payload_of(root, place):
    """A file of the base at this place of the line, that no other base has."""
    with LocalStore.read(root) as reader:
        files = [{ref.path for ref in reader.load(ref).files.values()} for ref in reader.line()]
    return root / min(files[place] - set().union(*files[:place], *files[place + 1 :]))


def test_what_cannot_be_read_and_is_not_needed_keeps_nobody_from_resuming(tmp_path, unread):
    """An old segment, and a base before the newest."""
    states, _ = reference(50)
    with_bases(tmp_path)
    segment = segment_with(tmp_path, 30)
    unread(segment, payload_of(tmp_path, 1))
    step, state = trained(tmp_path, 50, base_every=20)
    assert step == 45 and same(state, states[45])
    told = [
        event["what"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "unreadable"
    ]
    assert len(told) == 1 and segment.name in told[0]


@pytest.mark.slow
def test_a_record_that_cannot_be_read_is_not_given_up(tmp_path, unread, monkeypatch):
    """Its header neither; the step before it is named, and taken when it is asked for."""
    states, _ = reference(50)
    with_bases(tmp_path)
    wanted = segment_with(tmp_path, 44)
    unread(wanted)
    with pytest.raises(
        Unreadable, match=rf"{wanted.name} at offset 0.*Check the device.*resume\(step=\d+\)"
    ) as raised:
        trained(tmp_path, 0)
    last = raised.value.step
    assert last == int(wanted.name[5:17]) - 1
    with pytest.raises(Unreadable, match=rf"resume\(step={last}\)"):
        resumed_at(tmp_path, last + 1)
    monkeypatch.undo()  # it had passed
    step, state = trained(tmp_path, 0)
    assert step == 45 and same(state, states[45])


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(("lost", "back"), [(45, 0), (44, 3), (44, 0)])
def test_the_steps_before_a_record_that_cannot_be_read_are_gone_on_from(tmp_path, unread, lost, back):
    """Also when they were taken and nothing was done."""
    states, _ = reference(60)
    with_bases(tmp_path)
    wanted = segment_with(tmp_path, lost)
    unread(wanted)
    last = int(wanted.name[5:17]) - 1 - back
    step, state = resumed_at(tmp_path, last)
    assert step == last and same(state, states[last])
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        assert checkpointer.resume() == last
        go_on(loop, checkpointer, 60)
        checkpointer.save()  # after which segments are removed
    assert wanted.exists()
    step, state = trained(tmp_path, 0)
    assert step == 60 and same(state, states[60])


def test_a_segment_that_cannot_be_read_from_its_beginning_may_hold_what_follows_a_base(
    tmp_path, unread, monkeypatch
):
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", 64)
    states, _ = reference(45)
    with_bases(tmp_path)
    unread(segment_with(tmp_path, 30))
    assert segment_with(tmp_path, 30) == segment_with(tmp_path, 45)
    for asked, left in ((None, 40), (30, 20)):
        with pytest.raises(Unreadable, match=rf"resume\(step={left}\)"):
            resumed_at(tmp_path, asked)
    step, state = resumed_at(tmp_path, 40)
    assert step == 40 and same(state, states[40])


def test_a_step_that_was_left_behind_needs_no_record_before_its_base(tmp_path, unread):
    states, _ = reference(45)
    with_bases(tmp_path)
    assert resumed_at(tmp_path, 42)[0] == 42
    trained(tmp_path, 44)
    unread(segment_with(tmp_path, 30))
    step, state = begun_from(tmp_path / "other", f"{tmp_path}@45.t1")
    assert step == 45 and same(state, states[45])


def test_a_payload_that_cannot_be_read_names_the_step_before_it(tmp_path, monkeypatch):
    states, _ = reference(20)
    trained(tmp_path, 20, base_every=1000)
    with LocalStore.read(tmp_path) as reader:
        record = read_journal(reader, "rank-00000").records[15]
    real, path = os.preadv, str(tmp_path / record.path)

    def read(fd, views, offset, *rest):
        place = record.offset + record.header_bytes
        if os.readlink(f"/proc/self/fd/{fd}") == path and offset <= place < offset + sum(map(len, views)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset, *rest)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(Unreadable, match=r"resume\(step=14\)"):
        trained(tmp_path, 0)
    step, state = resumed_at(tmp_path, 14)
    assert step == 14 and same(state, states[14])


def begun_from(root, source):
    loop, checkpointer = start(root)
    with checkpointer:
        return checkpointer.resume(source=source), loop.state()


def resumed_at(root, step):
    loop, checkpointer = start(root)
    with checkpointer:
        return checkpointer.resume(step=step), loop.state()


def test_a_base_that_cannot_be_read_gives_way_to_the_one_before_where_that_leads_as_far(tmp_path, unread):
    states, _ = reference(45)
    with_bases(tmp_path)
    wanted = payload_of(tmp_path, 0)
    unread(wanted)
    with pytest.warns(UserWarning, match=f"resuming after step 45: read failed: .*{wanted.name}"):
        step, state = trained(tmp_path, 0)
    assert step == 45 and same(state, states[45])


@pytest.mark.slow
def test_a_base_that_cannot_be_read_is_not_given_up_where_the_one_before_leads_less_far(
    tmp_path, unread, monkeypatch
):
    """There is no record of step 31."""
    states, _ = reference(45)
    with_bases(tmp_path)
    remove(segment_with(tmp_path, 31))
    unread(payload_of(tmp_path, 0))
    for step in (None, 40):
        with pytest.raises(Unreadable, match=r"read failed: .*data/.*resume\(step=30\)"):
            resumed_at(tmp_path, step)
    monkeypatch.undo()
    step, state = trained(tmp_path, 0)
    assert step == 45 and same(state, states[45])
