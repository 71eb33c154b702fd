"""``compact`` and ``prune`` of a run in which somebody went back: of the line that was left nothing goes unnamed."""

from __future__ import annotations

import json
import shutil

import pytest

from checkpoint.loops import cut_small, same
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.store.commit.pruning import planned
from holdfast.store.commit.retention import Keep
from holdfast.store.run_store import LocalStore
from support.timelines import left_behind
from test_checkpointer import go_on, reference, start


def trained(root, steps, base=None, step=None):
    """The run is trained to ``steps`` from the newest, or from ``step``; with a base of ``base``."""
    loop, checkpointer = start(root, base_every=1000, keep=Keep(9))
    with checkpointer:
        checkpointer.resume(step=step)
        for each in range(checkpointer.steps_done + 1, steps + 1):
            go_on(loop, checkpointer, each)
            checkpointer._backend.recorder.drain()  # a segment of each step's record
            if each == base:
                checkpointer.save()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Twelve steps, with a base of no step alone."""
    cut_small(monkeypatch, 1)
    trained(tmp_path / "run", 12)
    return tmp_path / "run"


def resumed(root, step, tmp_path, timeline=None):
    """The state at ``step`` of a copy of the run, or of ``timeline``, since to go back begins another line."""
    copy, source = tmp_path / f"at-{step}", None
    if timeline is None:
        shutil.copytree(root, copy)
    else:
        step, source = None, f"{root}@{step}.t{timeline}"
    loop, checkpointer = start(copy, keep=Keep(99))
    with checkpointer:
        assert copy.name == f"at-{checkpointer.resume(step=step, source=source)}"
    return loop.state()


def left(root, after):
    with LocalStore.read(root) as reader:
        return left_behind(reader, after)


@pytest.mark.parametrize("to, steps", [(3, 7), (3, 8), (7, 7), (7, 9)])
def test_the_records_of_a_line_that_was_left_after_the_new_base_stay(run, tmp_path, to, steps):
    states, _ = reference(12)
    trained(run, steps, step=7)
    before = left(run, steps)
    assert before == set(range(steps + 1, 13))
    assert compact(run, to).dropped
    assert left(run, steps) == before
    for step in (steps + 1, 12):
        assert same(resumed(run, step, tmp_path, 1), states[step])


def test_a_base_that_later_steps_of_a_line_left_before_the_new_one_need_stays(run, tmp_path):
    states, _ = reference(12)
    trained(run, 9, step=3)
    done = compact(run, 6)
    assert not done.dropped and done.left == ((10, 12),)
    for step, timeline in ((2, None), (9, None), (10, 1), (12, 1)):
        assert same(resumed(run, step, tmp_path, timeline), states[step])


@pytest.mark.slow
def test_a_base_is_not_kept_for_steps_that_the_present_line_has_or_that_another_base_leads_to(run, tmp_path):
    states, _ = reference(16)
    trained(run, 16, base=14)
    trained(run, 13, step=3)
    assert compact(run, 6).dropped
    with LocalStore.read(run) as reader:
        assert [ref.step for ref in reader.line()] == [6]
    assert left(run, 13) == {14, 15, 16}
    for step, timeline in ((6, None), (13, None), (14, 2), (16, 2)):
        assert same(resumed(run, step, tmp_path, timeline), states[step])


def test_a_base_stays_for_steps_of_which_only_another_line_has_the_numbers(tmp_path, monkeypatch):
    cut_small(monkeypatch, 1)
    root = tmp_path / "run"
    trained(root, 14, base=10)
    trained(root, 14, step=5)  # another 10 to 14, which are what is gone back to
    trained(root, 9, step=3)
    done = compact(root, 6)
    assert not done.dropped and done.left == ((10, 14),)


def test_a_prune_names_steps_of_the_present_line_of_which_another_has_the_numbers(tmp_path):
    root = tmp_path / "run"
    trained(root, 9, base=4)
    trained(root, 12, base=12, step=5)
    with LocalStore.read(root) as reader:
        assert planned(reader, Keep(1, every=4)).lost == ((0, 3), (6, 11))


def test_it_is_said_what_a_base_stays_for(run, holdfast):
    trained(run, 9, step=3)
    out = holdfast("compact", run, "--to", 6).out
    assert "The base of step 0 stays" in out and "steps 10 to 12 of what a later resume left need it" in out
    done = json.loads(holdfast("compact", run, "--to", 8, "--json").out)
    assert done["from_step"] == 6 and done["dropped"] and done["stays_for"] == []
    assert "Steps 0 to 7, 10 to 12 could not be" in holdfast("prune", run, "--keep-last", 1, "--dry-run").out
    assert left(run, 9) == {10, 11, 12}
    holdfast("prune", run, "--keep-last", 1)
    assert left(run, 9) == set()


def test_steps_of_a_line_that_was_left_and_that_a_prune_loses_are_named(run, holdfast):
    """With the base that both lines have, and with one of its own."""
    trained(run, 11, base=10, step=7)
    out = holdfast("prune", run, "--keep-last", 1, "--dry-run").out
    assert out.endswith("Steps 0 to 9, 12 could not be recovered any more.\n")
    trained(run, 20, base=16)
    trained(run, 15, base=14, step=11)
    out = holdfast("prune", run, "--keep-last", 1, "--dry-run").out
    [row] = [row for row in out.splitlines() if row.split()[0] == "16"]
    assert row.rstrip().endswith("records to 20, left behind by a later resume")
    assert out.endswith("Steps 0 to 13, 16 to 20 could not be recovered any more.\n")
    before = left(run, 15)
    assert before == {16, 17, 18, 19, 20}
    holdfast("prune", run, "--keep-last", 1)
    assert left(run, 15) == set()
