"""``compact`` and ``prune`` of a run in which the device does not give back what was left."""

from __future__ import annotations

import pytest

from checkpoint.loops import same
from checkpoint.test_lost import begun_from, segment_with, small_segments, trained, unread, with_bases
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.store.disk import Disk
from holdfast.store.log.segments import segments
from holdfast.store.run_store import LocalStore
from test_checkpointer import go_on, reference, start

__all__ = ["small_segments", "unread"]


def left_at(root, step):
    """A run with bases in which somebody goes back to ``step``, and on for two steps; the first segment left."""
    with_bases(root)
    loop, checkpointer = start(root)
    with checkpointer:
        checkpointer.resume(step=step)
        go_on(loop, checkpointer, step + 2)
    return next(root / ref.path for ref in segments(Disk(root), "rank-00000") if ref.first_step > step)


@pytest.mark.slow
def test_a_prune_goes_on_where_what_was_left_cannot_be_read(tmp_path, unread, monkeypatch, holdfast):
    """And keeps that as long as the base that it follows."""
    states, _ = reference(45)
    wanted = left_at(tmp_path, 42)
    unread(wanted)
    for more in (["--dry-run"], []):
        out = holdfast("prune", tmp_path, "--keep-last", 1, *more).out
        assert "Steps 20 to 39 c" in out and "what cannot be read are not counted: " in out
        assert wanted.name in out
    with LocalStore.read(tmp_path) as reader:
        assert [ref.step for ref in reader.commits()] == [40]
    monkeypatch.undo()  # it had passed
    step, state = begun_from(tmp_path / "other", f"{tmp_path}@45.t1")
    assert step == 45 and same(state, states[45])


@pytest.mark.slow
def test_the_base_that_what_cannot_be_read_may_need_stays(tmp_path, unread, monkeypatch, holdfast):
    states, _ = reference(45)
    wanted = left_at(tmp_path, 41)
    holdfast("prune", tmp_path, "--keep-last", 1)
    unread(wanted)
    out = holdfast("compact", tmp_path, "--to", 43).out
    assert "The base of step 40 stays, since what cannot be read may need it: " in out and wanted.name in out
    monkeypatch.undo()
    step, state = begun_from(tmp_path / "other", f"{tmp_path}@45.t1")
    assert step == 45 and same(state, states[45])


@pytest.mark.slow
def test_a_base_does_not_stay_for_what_cannot_be_read_and_another_leads_to(tmp_path, unread, monkeypatch):
    """Behind the new base, on the present line, and on one that was left behind a base of its own."""
    states, _ = reference(45)
    wanted = left_at(tmp_path, 42)
    unread(wanted)
    assert compact(tmp_path, 30).dropped
    trained(tmp_path, 45)
    unread(segment_with(tmp_path, 45))
    done = compact(tmp_path, 35)
    assert done.dropped and done.unread == () and wanted.exists()
    monkeypatch.undo()
    step, state = trained(tmp_path, 0)
    assert step == 45 and same(state, states[45])
