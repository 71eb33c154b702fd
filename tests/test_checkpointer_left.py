"""Steps that a later resume left behind: which of them can be had, and what is said of those that cannot."""

from __future__ import annotations

import pytest
import torch

from checkpoint.loops import same
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.errors import NoCommit
from holdfast.opening import source_of
from holdfast.store.format.manifest import CommitRef
from holdfast.store.log.chain import last_step, verify_records
from holdfast.store.reader import RunReader
from test_checkpointer import go_on, reference, start


@pytest.fixture
def run(tmp_path):
    """A run of 12 steps that somebody went back in, to step 7, and left without a step."""
    loop, checkpointer = start(tmp_path / "run", base_every=100)
    with checkpointer:
        checkpointer.resume()
        for step in (4, 9, 12):
            go_on(loop, checkpointer, step)
            if step < 12:
                checkpointer.save()
    with start(tmp_path / "run", base_every=100)[1] as checkpointer:
        assert checkpointer.resume(step=7) == 7
    return tmp_path / "run"


OTHER = r"have a timeline in their name: .*@{step}\.tTIMELINE, of 1, is a source for a fresh"


def test_abandoned_step_is_refused_with_its_name(run, tmp_path):
    said = OTHER.format(step=11)
    with start(run, base_every=100)[1] as checkpointer, pytest.raises(NoCommit, match=said):
        checkpointer.resume(step=11)
    with start(tmp_path / "new")[1] as checkpointer, pytest.raises(NoCommit, match=said):
        checkpointer.resume(source=f"{run}@11")
    with pytest.raises(NoCommit, match=said):
        source_of(f"{run}@11")
    with start(run)[1] as checkpointer:
        assert checkpointer.resume() == 7


def test_a_step_that_both_lines_have_is_the_present_ones(run):
    loop, checkpointer = start(run, base_every=100)
    with checkpointer:
        checkpointer.resume()
        torch.manual_seed(99)  # another future
        go_on(loop, checkpointer, 10)
        other = loop.state()
    loop, checkpointer = start(run, base_every=100)
    with checkpointer:
        assert checkpointer.resume(step=10) == 10
        assert same(loop.state(), other)


@pytest.mark.parametrize("step", [9, 11, 12])
def test_abandoned_step_begins_another_run(run, tmp_path, step):
    states, _ = reference(14)
    loop, checkpointer = start(tmp_path / "new")
    with checkpointer:
        assert checkpointer.resume(source=f"{run}@{step}.t1") == step
        assert same(loop.state(), states[step])
        go_on(loop, checkpointer, 14)
    assert same(loop.state(), states[14])
    assert source_of(f"{run}@{step}.t1").progress["step"] == step


def test_a_step_that_both_lines_share_is_no_other(run):
    for name in ("6", "6.t1", "6.t2"):
        assert source_of(f"{run}@{name}").progress["step"] == 6


@pytest.fixture
def compacted(run):
    """The other line has come to step 12, and of it there is only that step. Of the one that was left there are 9 to
    12."""
    loop, checkpointer = start(run, base_every=100)
    with checkpointer:
        checkpointer.resume()
        torch.manual_seed(99)  # another future
        go_on(loop, checkpointer, 12)
    assert compact(run, 12).dropped
    return run


@pytest.mark.parametrize("step", [9, 11])
def test_a_step_that_compact_dropped_is_not_that_of_another_line(compacted, step, tmp_path):
    states, _ = reference(12)
    said = OTHER.format(step=step)
    with start(compacted)[1] as checkpointer, pytest.raises(NoCommit, match=said):
        checkpointer.resume(step=step)
    with pytest.raises(NoCommit, match=said):
        source_of(f"{compacted}@{step}")
    loop, checkpointer = start(tmp_path / "again")
    with checkpointer:
        assert checkpointer.resume(source=f"{compacted}@{step}.t1") == step
        assert same(loop.state(), states[step])
    with start(compacted)[1] as checkpointer:
        assert checkpointer.resume() == 12


def test_a_step_before_another_is_of_the_present_line_or_nowhere(compacted):
    with start(compacted)[1] as checkpointer, pytest.raises(NoCommit, match="no commit of step 11 or before"):
        checkpointer.resume(before=12)


def test_a_commit_that_was_left_is_had_by_its_timeline_alone(compacted):
    reader = RunReader(compacted)
    with pytest.raises(NoCommit, match=OTHER.format(step=9)):
        reader.at(9)
    for step, timeline, its in ((9, 1, 1), (12, None, 3), (12, 3, 3)):
        assert reader.at(step, timeline).timeline == its


def test_the_newest_step_is_that_of_the_present_line_still(run):
    with start(run)[1] as checkpointer:
        assert checkpointer.resume() == 7


def test_it_is_known_how_far_the_records_of_a_left_base_lead(run):
    reader = RunReader(run)
    left = reader.load(CommitRef(1, 9))
    assert left.ref not in reader.line()
    assert last_step(reader, left) == 12
    assert verify_records(reader, left) == (12, [])
