"""Copies of the state in memory, as ``every="auto"`` may choose them: what a killed process left comes back bit for bit
if it is whole, newer than the disk and of this run. Nothing else is taken, and a clean end leaves nothing in memory.

A choice is made after 11 steps, with a base of step 10 on the disk; then each second step is copied."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from checkpoint.loops import cut_small, same
from holdfast.checkpoint.recovery.lineage import Lineage
from holdfast.checkpoint.replica import retained_state, shared_memory
from holdfast.checkpoint.snapshot import memory_copies, snapshot_scheduler
from holdfast.cli import inspect
from holdfast.errors import BadInput, DiskFull
from holdfast.events import read_events
from holdfast.schedule.interval.step_cadence import CadenceChoice
from holdfast.schedule.interval.tuner import MEAN_SECONDS_BETWEEN_FAILURES
from holdfast.store.run_store import LocalStore
from killed import Killed
from support.switching import copy_often
from test_checkpointer import go_on, reference, start

BASE, STOP, COPY = 10, 19, 18
"""The step that the disk has, the last one that is done, and the one that memory has."""

auto = partial(start, every="auto")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    (tmp_path / "memory").mkdir()
    copy_often(tmp_path / "memory", monkeypatch.setattr)
    return tmp_path / "memory"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


def leave(root, stop=STOP, feature="batchnorm"):
    """Train a run to ``stop`` and leave it as a kill does. Returns its loop."""
    loop, checkpointer = auto(root, feature)
    checkpointer.resume()
    train(loop, checkpointer, stop)
    checkpointer.close(save=False)
    return loop


def resumed(root, **asked):
    """The step at which another process continues, which ends at once."""
    with auto(root)[1] as checkpointer:
        return checkpointer.resume(**asked)


def train(loop, checkpointer, stop):
    """What is on its way to the disk is written before the next step."""
    while checkpointer.steps_done < stop:
        loop.iteration(checkpointer.steps_done, checkpointer.step)
        checkpointer._backend.recorder.drain()


def events(root, kind):
    return [event for event in read_events(root / "events.jsonl") if event["event"] == kind]


def data_files(memory):
    return sorted(memory.glob(f"*/{retained_state.KEPT}/data/*"))


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("feature", ["batchnorm", "schedule", "scaler", "ema", "two", "frozen", "tied"])
def test_killed_run_continues_from_its_copy(memory, root, feature):
    states, losses = reference(STOP + 4, feature)
    leave(root, feature=feature)
    loop, checkpointer = auto(root, feature)
    with checkpointer:
        assert checkpointer.resume() == COPY and same(loop.state(), states[COPY])
        assert (checkpointer.durable_step, checkpointer.replica_step) == (BASE, COPY)
        assert not checkpointer._backend.pace.cadence.is_measuring
        go_on(loop, checkpointer, STOP + 4)
    assert same(loop.state(), states[STOP + 4]) and checkpointer.durable_step == STOP + 4
    assert loop.losses == losses[len(losses) - len(loop.losses) :]


def test_what_is_durable_stays_behind_what_memory_has(memory, root):
    loop, checkpointer = auto(root)
    with checkpointer:
        checkpointer.resume()
        train(loop, checkpointer, STOP)
        checkpointer._backend._copies._wait()
        assert (checkpointer.durable_step, checkpointer.replica_step) == (BASE, COPY)
        checkpointer.wait()
        assert checkpointer.durable_step == STOP == checkpointer.replica_step


def test_run_is_killed_again_before_its_next_copy(memory, root):
    states, _ = reference(STOP + 4)
    leave(root)
    for _ in range(2):
        loop, checkpointer = auto(root)
        assert checkpointer.resume() == COPY and same(loop.state(), states[COPY])
        train(loop, checkpointer, COPY + 1)
        checkpointer.close(save=False)


def test_step_that_only_memory_had_is_not_said_to_have_been_durable(memory, root):
    leave(root)
    _, checkpointer = auto(root)
    assert checkpointer.resume() == COPY
    checkpointer.close(save=False)
    shutil.rmtree(memory)  # the machine ends
    memory.mkdir()
    assert resumed(root) == BASE  # a warning would be an error


def test_copy_that_is_cut_off_gives_way_to_the_one_before(memory, root, kill_at):
    states, _ = reference(COPY)
    loop, checkpointer = auto(root)
    checkpointer.resume()
    train(loop, checkpointer, COPY - 1)
    kill_at("after_chunk_copied:2")
    with pytest.raises(Killed):
        train(loop, checkpointer, COPY)
    checkpointer.close(save=False)
    loop, checkpointer = auto(root)
    with checkpointer:
        assert checkpointer.resume() == COPY - 2 and same(loop.state(), states[COPY - 2])


def test_damaged_copy_gives_way_to_the_disk(memory, root):
    states, _ = reference(BASE)
    leave(root)
    for file in data_files(memory):
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    loop, checkpointer = auto(root)
    with checkpointer:
        with pytest.warns(UserWarning, match=f"copy of step {COPY} in memory is not whole"):
            assert checkpointer.resume() == BASE
        assert same(loop.state(), states[BASE])


def test_damaged_manifest_of_a_copy_is_told_of(memory, root):
    leave(root)
    for manifest in memory.glob(f"*/{retained_state.KEPT}/commits/*"):
        manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="that memory kept is damaged, and is passed over"):
        assert resumed(root) == BASE


def test_torn_record_beside_a_copy_is_not_durable(root):
    """A kill amid the write of a record may leave its header."""
    loop, checkpointer = start(root)
    checkpointer.resume()
    train(loop, checkpointer, 5)
    checkpointer.close(save=False)
    with LocalStore(root) as store:
        [chain] = Lineage.of(store, store.load(store.line()[0]), None).chains.values()
        last = chain.records[-1]
        with open(root / last.path, "r+b") as file:
            file.seek(last.offset + last.header_bytes)
            file.write(bytes(last.payload_bytes))
        assert (retained_state.newest(store, 5), memory_copies.disk_step(store, 5)) == (5, 4)
        assert memory_copies.disk_step(store, 3) == 3


def test_copy_of_a_run_on_another_disk_is_said_to_be_lost_there(memory, root, tmp_path):
    leave(root)
    shutil.copytree(root, tmp_path / "moved")
    shutil.rmtree(root)
    with pytest.raises(BadInput, match=f"for the directory {root}, and from another one it cannot be taken"):
        resumed(tmp_path / "moved")
    assert resumed(tmp_path / "moved", step=BASE) == BASE


def test_listing_beside_a_clean_end(memory, root, monkeypatch, capsys):
    """The trainer removes its memory between two looks."""

    class Ending:
        def glob(self, pattern):
            found = [*memory.glob(pattern)]
            shutil.rmtree(memory)
            return found

    leave(root)
    monkeypatch.setattr(inspect, "MEMORY", Ending())
    inspect.ls(root, as_json=False)
    assert "In the memory" not in capsys.readouterr().out


def test_clean_end_leaves_nothing_in_memory(memory, root):
    loop, checkpointer = auto(root)
    with checkpointer:
        checkpointer.resume()
        train(loop, checkpointer, STOP)
        assert data_files(memory)
    assert list(memory.iterdir()) == []


def test_end_by_an_error_keeps_the_copy_and_says_so(memory, root, caplog):
    loop, checkpointer = auto(root)
    with caplog.at_level("INFO", logger="holdfast"), pytest.raises(ZeroDivisionError), checkpointer:
        checkpointer.resume()
        train(loop, checkpointer, STOP)
        raise ZeroDivisionError
    assert f"step {COPY} is in the memory of this machine" in caplog.text
    assert f"the disk has step {BASE}" in caplog.text
    assert resumed(root) == COPY


def test_records_follow_a_base_of_a_run_that_continues_from_memory(memory, root):
    states, _ = reference(STOP + 5)
    leave(root)
    loop, checkpointer = start(root)
    assert checkpointer.resume() == COPY
    train(loop, checkpointer, STOP + 5)
    assert checkpointer.durable_step == STOP + 5 and list(memory.iterdir()) == []
    checkpointer.close(save=False)
    loop, checkpointer = start(root)
    with checkpointer:
        assert checkpointer.resume() == STOP + 5 and same(loop.state(), states[STOP + 5])


def test_memory_is_given_back_where_copies_are_not_chosen(memory, root, monkeypatch):
    def records(measured, limits, rates, *_):
        return CadenceChoice(1, 0.1, 0.2, 1.0, rates)

    monkeypatch.setattr(snapshot_scheduler, "choose", records)
    loop, checkpointer = auto(root)
    with checkpointer:
        checkpointer.resume()
        train(loop, checkpointer, BASE)
        assert data_files(memory)
        train(loop, checkpointer, STOP)
        assert list(memory.iterdir()) == [] and checkpointer.durable_step == STOP


def test_memory_is_given_back_where_memory_holds_no_whole_base(memory, root, monkeypatch):
    leave(root)
    monkeypatch.setattr(snapshot_scheduler.SnapshotScheduler, "_has_room", False)
    loop, checkpointer = auto(root)
    with checkpointer:
        with pytest.warns(UserWarning, match="records every step, since a copy of the state"):
            assert checkpointer.resume() == COPY
        assert data_files(memory)
        train(loop, checkpointer, STOP + 4)
        assert list(memory.iterdir()) == [] and checkpointer.durable_step == STOP + 4


def test_memory_is_given_back_after_a_failed_copy(memory, root, monkeypatch):
    loop, checkpointer = auto(root)
    with checkpointer:
        checkpointer.resume()
        train(loop, checkpointer, STOP)
        copies = checkpointer._backend._copies
        copies._wait()
        monkeypatch.setattr(copies._memory, "publish", fail)
        train(loop, checkpointer, STOP + 6)
        assert checkpointer.durable_step > COPY and list(memory.iterdir()) == []


def fail(*_):
    raise DiskFull("made up")


def test_copy_of_a_copied_run_is_not_taken(memory, root, tmp_path):
    leave(root)
    shutil.copytree(root, tmp_path / "other")
    assert resumed(tmp_path / "other") == BASE
    assert resumed(root) == COPY


def test_copy_of_an_earlier_run_in_the_directory_is_not_taken(memory, root):
    leave(root)
    for entry in root.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    loop, checkpointer = auto(root)
    with checkpointer:
        assert checkpointer.resume() == 0
        go_on(loop, checkpointer, 3)
    assert resumed(root) == 3


def test_copy_of_an_abandoned_timeline_is_not_taken(memory, root, tmp_path):
    leave(root)
    [place] = memory.iterdir()
    shutil.copytree(place, tmp_path / "aside")
    loop, checkpointer = auto(root)
    assert checkpointer.resume(step=BASE) == BASE
    go_on(loop, checkpointer, BASE + 1)
    checkpointer.save()
    checkpointer.close(save=False)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(tmp_path / "aside", place)
    assert resumed(root) == BASE + 1


def test_refused_save_into_the_run_does_not_hide_the_copy(memory, root):
    leave(root)
    with LocalStore(root) as store:
        own = store.timelines()[0][1]
    other = replace(own, id=2, parent=1, fork_step=BASE, key="0" * 32, parent_key=own.key, by_saves=True)
    (root / other.path).write_bytes(other.encode())
    assert resumed(root) == COPY


def test_copy_that_is_older_than_the_disk_is_not_taken(memory, root, tmp_path):
    loop, checkpointer = auto(root)
    checkpointer.resume()
    train(loop, checkpointer, STOP)
    checkpointer._backend._copies._wait()
    [place] = memory.iterdir()
    shutil.copytree(place, tmp_path / "aside")
    checkpointer.save()
    checkpointer.close(save=False)
    shutil.copytree(tmp_path / "aside", place)
    assert resumed(root) == STOP


def leave_with_base_after_copy(root, memory, aside):
    """Leave a run as a kill does that comes when a base is newer than the copy, which is still there."""
    loop, checkpointer = auto(root)
    checkpointer.resume()
    train(loop, checkpointer, STOP)
    checkpointer._backend._copies._wait()
    [place] = memory.iterdir()
    shutil.copytree(place, aside)
    checkpointer.save()
    checkpointer.close(save=False)
    shutil.copytree(aside, place)


def test_step_of_an_abandoned_base_is_not_durable(memory, root, tmp_path):
    states, _ = reference(COPY)
    leave_with_base_after_copy(root, memory, tmp_path / "aside")
    loop, checkpointer = auto(root)
    assert checkpointer.resume(step=COPY) == COPY
    assert (checkpointer.durable_step, checkpointer.replica_step) == (BASE, COPY)
    checkpointer.close(save=False)
    loop, checkpointer = auto(root)
    assert checkpointer.resume() == COPY and same(loop.state(), states[COPY])
    checkpointer.wait()
    assert checkpointer.durable_step == COPY
    checkpointer.close(save=False)
    shutil.rmtree(memory)
    memory.mkdir()
    assert resumed(root) == COPY


@pytest.mark.parametrize("whole", [(BASE,), ()])
def test_copy_is_taken_where_newer_bases_are_damaged(memory, root, tmp_path, whole):
    states, _ = reference(STOP)
    leave_with_base_after_copy(root, memory, tmp_path / "aside")
    with LocalStore(root) as store:
        damaged = [store.load(ref) for ref in store.commits() if ref.step not in whole]
        for path in {file.path for base in damaged for file in base.files.values()}:
            (root / path).write_bytes((root / path).read_bytes()[:-1] + b"?")
    loop, checkpointer = auto(root)
    with checkpointer:
        with pytest.warns(UserWarning, match="copy in memory was taken, since the disk leads to"):
            assert checkpointer.resume() == COPY
        assert same(loop.state(), states[COPY])
        if whole:
            assert checkpointer.durable_step == BASE
        train(loop, checkpointer, STOP)
    assert same(loop.state(), states[STOP]) and resumed(root) == STOP


def test_damaged_copy_beside_a_damaged_base_leaves_the_base_before(memory, root, tmp_path):
    states, _ = reference(BASE)
    leave_with_base_after_copy(root, memory, tmp_path / "aside")
    with LocalStore(root) as store:
        paths = [root / file.path for file in store.load(store.commits()[0]).files.values()]
    *_, one, other = data_files(memory)  # both slots of the last chunk
    for path in (*paths, one, other):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    loop, checkpointer = auto(root)
    with pytest.warns(UserWarning) as told:
        assert checkpointer.resume() == BASE
    assert f"copy of step {COPY} in memory is not whole" in str(told[0].message)
    assert same(loop.state(), states[BASE])
    checkpointer.close(save=False)


@pytest.mark.parametrize("asked", [{}, {"step": BASE}])
def test_copy_that_nothing_continues_from_gives_its_memory_back(memory, root, tmp_path, asked):
    leave_with_base_after_copy(root, memory, tmp_path / "aside")
    with start(root)[1] as checkpointer:
        assert checkpointer.resume(**asked) == asked.get("step", STOP)
        assert list(memory.iterdir()) == []


def test_rollback_drops_the_copy_of_what_it_abandons(memory, root, caplog):
    states, _ = reference(BASE)
    loop, checkpointer = auto(root)
    checkpointer.resume()
    train(loop, checkpointer, STOP)
    with caplog.at_level("INFO", logger="holdfast"):
        assert checkpointer.rollback(BASE) == BASE
    assert list(memory.iterdir()) == [] and "in the memory" not in caplog.text
    assert checkpointer.replica_step == BASE and same(loop.state()["model"], states[BASE]["model"])
    checkpointer.close(save=False)
    loop, checkpointer = auto(root)
    with checkpointer:
        assert checkpointer.resume() == BASE and same(loop.state(), states[BASE])


def test_step_asked_for_is_found_in_memory_or_on_the_disk(memory, root):
    for asked, found in (({"before": COPY}, BASE), ({"step": BASE}, BASE)):
        leave(root)
        assert resumed(root, **asked) == found
        shutil.rmtree(root)
    leave(root)
    assert resumed(root, step=COPY) == COPY


def test_without_memory_steps_are_kept_in_another_way_and_it_says_so(memory, root, monkeypatch, caplog):
    monkeypatch.setattr(memory_copies, "free_host_bytes", lambda: 10_000)
    loop, checkpointer = auto(root)
    with checkpointer, caplog.at_level("INFO", logger="holdfast"):
        checkpointer.resume()
        train(loop, checkpointer, STOP)
        assert checkpointer.durable_step == STOP == checkpointer.replica_step
    assert "continues without copies in memory: two copies of the state take" in caplog.text
    assert [event["copies"] for event in events(root, "every")] == [0, 0]
    assert list(memory.iterdir()) == []


def test_state_that_grows_is_copied_in_its_new_form(memory, root):
    loop, checkpointer = auto(root, "unused")
    checkpointer.resume()
    train(loop, checkpointer, STOP)
    [made] = events(root, "copies")
    loop.model.register_buffer("later", torch.zeros(5000))
    with pytest.warns(UserWarning, match="later came into being"):
        train(loop, checkpointer, STOP + 4)
    checkpointer._backend._copies._wait()
    assert checkpointer.replica_step == STOP + 3
    assert events(root, "copies")[-1]["bytes"] > made["bytes"]
    checkpointer.close(save=False)


def test_several_ranks_and_nodes_have_no_copies_in_memory(memory, root):
    leave(root)
    with LocalStore(root) as store:
        assert memory_copies.why_unavailable(store, 1, False) == ""
        assert "one process" in memory_copies.why_unavailable(store, 2, False)
        assert "one process" in memory_copies.why_unavailable(store, 1, True)
        with pytest.raises(BadInput, match=f"kept step {COPY} in memory, and step {BASE} is on the disk"):
            retained_state.refuse_to_leave(root, store, BASE)


def test_resumes_on_other_machines_are_failures_that_memory_does_not_survive():
    def seconds(*writers):
        timelines = [SimpleNamespace(writer=each) for each in writers]
        store = SimpleNamespace(timelines_at_begin=timelines, restarts=lambda: (0.0, len(writers) - 1))
        return memory_copies.machine_seconds(store, None)

    here, anew, there = ({"host": host, memory_copies.BOOT: boot} for host, boot in ("aa", "ab", "ba"))
    assert seconds(here, here, here) == MEAN_SECONDS_BETWEEN_FAILURES
    assert seconds(here, anew, anew) == MEAN_SECONDS_BETWEEN_FAILURES / 2
    assert seconds(here, there, here) == MEAN_SECONDS_BETWEEN_FAILURES / 3
    assert seconds({"host": "a"}, here) == MEAN_SECONDS_BETWEEN_FAILURES  # a record of an earlier version
    assert memory_copies.this_machine().keys() <= {memory_copies.BOOT} and shared_memory.MEMORY


def test_ls_names_the_step_that_only_memory_has(memory, root, monkeypatch, capsys):
    monkeypatch.setattr(inspect, "MEMORY", memory)
    leave(root)
    inspect.ls(root, as_json=False)
    assert f"In the memory of this machine alone, for the next start: step {COPY}" in capsys.readouterr().out
    assert resumed(root) == COPY
    inspect.ls(root, as_json=False)
    assert "memory" not in capsys.readouterr().out
