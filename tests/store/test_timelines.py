"""Timeline records stay for as long as something needs them, and a run keeps its key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from holdfast.checkpointer import Checkpointer
from holdfast.errors import RunMismatch
from holdfast.store.commit.retention import ANCESTORS_KEPT
from holdfast.store.format.manifest import Timeline
from holdfast.store.reader import with_run
from holdfast.store.run_store import LocalStore
from tiny_run import TinyRun, flip


def resumed(root, saves=True):
    """The step of a run that is opened, does one step more, and is closed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(root, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
        step = checkpointer.resume()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.step()
        if saves:
            checkpointer.save()
    return step


def test_records_that_lead_to_nothing_go(tmp_path):
    keys = set()
    for number in range(12):
        assert resumed(tmp_path) == number
        with LocalStore.read(tmp_path) as reader:
            keys.add(reader.run_key())
            assert reader.tip() == number + 1 and len(reader.line()) == 2
    assert len(list((tmp_path / "timelines").iterdir())) <= ANCESTORS_KEPT
    assert len(keys) == 1
    with LocalStore.open(tmp_path) as store:
        store.begin(None if not store.line() else store.load(store.line()[0]))
        seconds, resumes = store.restarts()
        assert resumes == 12 and seconds > 0  # though most of the records are gone
        assert store.opened.id == 13  # no number is given again


def test_records_that_lead_to_steps_stay(tmp_path):
    for number in range(8):
        assert resumed(tmp_path, saves=False) == number
    assert len(list((tmp_path / "timelines").iterdir())) == 8
    assert resumed(tmp_path) == 8


def test_a_copy_of_the_run_has_its_key(tmp_path):
    """Which is in every record, so that two runs are told apart when their first timelines are gone."""
    record = Timeline(3, 2, 7, "own", "parents", run="first", begun=12.5)
    again = Timeline.decode(record.encode(), record.path)
    assert (again.run, again.begun) == ("first", 12.5)
    earlier = Timeline(3, 2, 7, "own", "parents")
    assert b'"run"' not in earlier.encode()  # as an earlier version wrote it
    assert Timeline.decode(earlier.encode(), earlier.path).run == ""
    alone = Timeline(3, 2, 7, "own", "parents", created=12.5, run="own", begun=12.5)  # nothing told its run
    assert Timeline.decode(alone.encode(), alone.path) == alone


def test_stand_ins_get_the_run_that_they_belong_to():
    """By keys of records that were read; without such a link only where the own file is there."""
    records = {
        1: Timeline(1, None, None, "a", run="a", begun=5.0),
        2: Timeline(2, 1, 3, "b", "a"),
        3: Timeline(3, 2, 4, "c", "b"),
        4: Timeline(4, None, None, "d"),
        5: Timeline(5, 1, 3, "e", "other"),
    }
    found = with_run(records, {1}, {records[4].path})
    assert [(each.run, each.begun) for each in found.values()] == [("a", 5.0)] * 4 + [("", 0.0)]


def test_two_runs_are_told_apart_without_their_beginnings(tmp_path):
    """Though none of their timelines have one number."""
    resumed(tmp_path / "a")
    for _ in range(7):
        resumed(tmp_path / "b")
    assert min(path.name for path in (tmp_path / "b" / "timelines").iterdir()) == "t0004.json"
    for name in ("commits", "timelines"):
        shutil.copytree(tmp_path / "b" / name, tmp_path / "a" / name, dirs_exist_ok=True)
    with pytest.raises(RunMismatch, match="no beginning in common"):
        LocalStore.open(tmp_path / "a")


@pytest.mark.parametrize("resumes", [2, 3])
@pytest.mark.parametrize("harm", [lambda path: flip(path, 100), Path.unlink])
def test_a_rebuilt_record_keeps_the_run(tmp_path, harm, resumes):
    """Though its timeline has no parent and is not the run's first."""
    with LocalStore.open(tmp_path) as store:
        first = store.begin(None)
        key = store.opened.key
    for _ in range(resumes):
        with TinyRun(tmp_path, retain=4, copies=6) as run:
            run.take_step()
    with LocalStore.read(tmp_path) as reader:
        before = reader.timelines()[0]
    assert first not in before and before[2].parent is None and before[2].run == key
    harm(tmp_path / before[2].path)
    with LocalStore.read(tmp_path) as reader:
        assert reader.run_key() == key
    with TinyRun(tmp_path, retain=4, copies=6) as run:
        assert run.step == resumes and run.store.opened.run == key
    with LocalStore.read(tmp_path) as reader:
        again, damaged = reader.timelines()
    assert not damaged and (again[2].run, again[2].begun) == (key, before[2].begun)
    assert Timeline.decode((tmp_path / again[2].path).read_bytes(), again[2].path).run == key


def test_commits_without_records_are_of_another_run(tmp_path):
    """They are not taken for the run's own because nothing says whose they are."""
    resumed(tmp_path / "a")
    with LocalStore.open(tmp_path / "b") as store:
        store.begin(None)
    resumed(tmp_path / "b")
    shutil.copytree(tmp_path / "b" / "commits", tmp_path / "a" / "commits", dirs_exist_ok=True)
    with pytest.raises(RunMismatch, match="no beginning in common"):
        LocalStore.open(tmp_path / "a")


def test_pruning_does_not_change_the_line(tmp_path):
    """The run went back and has no commit since; the save of a newer timeline was killed."""
    with TinyRun(tmp_path, retain=5, copies=9) as run:
        for _ in range(3):
            run.take_step()
    with TinyRun(tmp_path, retain=5, copies=9) as run:
        left = run.take_step()
    with TinyRun(tmp_path, retain=5, copies=9, fork=2) as run:
        present = run.timeline
    with LocalStore.open(tmp_path, retain=5) as store:
        assert store.tip() == present
        store.begin(store.load(store.line()[0]), by_saves=True)
    with LocalStore.open(tmp_path, retain=5) as store:
        assert store.tip() == present
        store.retire([store.at(1).ref], [])
    with LocalStore.read(tmp_path) as reader:
        assert (reader.tip(), reader.line()[0].step) == (present, 2)
        assert left.ref in reader.commits()
