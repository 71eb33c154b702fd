"""What is lost with a small file of a run, removed or damaged: no more than it must be, and never without a word."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from delta.loops import same
from holdfast.checkpointer import Checkpointer
from holdfast.delta import division
from holdfast.store import journal
from holdfast.store.files import Disk
from holdfast.store.local import LocalStore
from holdfast.store.segments import read_segment, segments
from test_checkpointer import reference, start


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """A base is of several units, one of them in each step; a segment holds one group."""
    monkeypatch.setattr(division, "UNIT_BYTES", 100)
    monkeypatch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 1)
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", 1)


def trained(root, steps, **options):
    """Resume and train to ``steps``; the step resumed from, and the state there."""
    loop, checkpointer = start(root, **options)
    with checkpointer:
        found = checkpointer.resume(), loop.state()
        for i in range(checkpointer.steps_done, steps):
            loop.iteration(i, checkpointer.step)
            checkpointer._survival.recorder.settle()
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
    with pytest.warns(UserWarning, match="Steps 7 to 9 had been durable, and are lost"):
        trained(tmp_path, 8, base_every=1000)
    with LocalStore.read(tmp_path) as reader:
        assert sorted(reader.timelines()[0]) == [1, 3]


@pytest.mark.parametrize("harm", [flip, remove])
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
