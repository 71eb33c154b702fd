"""What is no longer in the directory: never a silent beginning, and what is lost is told from what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import warnings

import pytest
import torch

from checkpoint.loops import cut_small, same
from holdfast.errors import Damaged, RunMismatch
from holdfast.store.log.chain import read_journal, verify_records
from holdfast.store.log.segments import segments
from holdfast.store.run_store import LocalStore
from test_checkpointer import go_on, reference, start


def trained(root, steps=12):
    loop, checkpointer = start(root, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, steps)
    return root


def overwrite(root, step):
    """Of the payload of the record of ``step``, some bytes."""
    with LocalStore.read(root) as reader:
        record = read_journal(reader, "rank-00000").records[step]
    with open(root / record.path, "r+b") as file:
        file.seek(record.offset + record.header_bytes + 16)
        file.write(b"damage")


def resumed(root):
    """The step that is resumed, and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with start(root)[1] as checkpointer:
            return checkpointer.resume(), " ".join(str(each.message) for each in told)


def test_a_run_without_its_commits_does_not_begin_anew(tmp_path):
    root = trained(tmp_path / "run")
    shutil.rmtree(root / "commits")
    with (
        start(root)[1] as checkpointer,
        pytest.raises(RunMismatch, match="records that follow one"),
    ):
        checkpointer.resume()


def test_a_log_of_events_decides_nothing(tmp_path):
    """Whatever its lines say, of any kind and depth, a resume does what it does without them."""
    root = trained(tmp_path / "run")
    lines = [
        json.dumps(
            {"event": kind, "time": 1.0, "step": 99, "durable_step": 99, "first_step": 99, "replica_in": "/"}
        )
        for kind in ("step", "base", "kept", "closed", "checkpointer", "recovered", "mine")
    ]
    with open(root / "events.jsonl", "a") as log:
        log.write(
            "\n".join([*lines, "[" * 5000, '{"event": "step", "durable_step": ' + "9" * 5000 + "}", "\0"])
        )
    assert resumed(root) == (12, "")
    (root / "events.jsonl").unlink()
    os.mkfifo(root / "events.jsonl")
    step, told = resumed(root)
    assert step == 12 and "no more events are written" in told
    for folder in ("commits", "journal", "data", "timelines", "index"):
        shutil.rmtree(root / folder)
    assert resumed(root)[0] == 0


def test_a_run_without_its_journal_is_refused_until_it_is_asked_for_what_is_left(tmp_path):
    root = trained(tmp_path / "run")
    shutil.rmtree(root / "journal")
    with (
        start(root)[1] as checkpointer,
        pytest.raises(Damaged, match=r"has no journal/, .* resume\(step=0\)"),
    ):
        checkpointer.resume()
    with start(root)[1] as checkpointer:
        assert checkpointer.resume(step=0) == 0
    assert resumed(root) == (0, "")  # which was left on purpose


def test_a_step_that_was_gone_back_to_is_no_loss(tmp_path):
    root = trained(tmp_path / "run")
    with start(root)[1] as checkpointer:
        checkpointer.resume(step=5)
    assert resumed(root) == (5, "")


def test_the_records_that_follow_show_what_was_durable(tmp_path):
    root = trained(tmp_path / "run", 20)
    overwrite(root, 6)
    step, told = resumed(root)
    assert step == 5
    assert "Steps 6 to 12 had been durable, and are lost" in told  # 8 more may have been on their way


def test_a_segment_that_was_begun_after_a_damaged_one_shows_that_that_was_durable(tmp_path, monkeypatch):
    cut_small(monkeypatch, groups=1)
    root = trained(tmp_path / "run")
    first, *_ = segments(LocalStore.read(root).disk, "rank-00000")
    beyond = segments(LocalStore.read(root).disk, "rank-00000")[1].first_step
    (root / first.path).write_bytes(b"\xff" * os.path.getsize(root / first.path))
    step, told = resumed(root)
    assert step == 0
    assert f"Steps 1 to {beyond - 1} had been durable, and are lost" in told


def test_what_a_kill_tears_is_told_as_such(tmp_path):
    root = trained(tmp_path / "run")
    overwrite(root, 12)
    step, told = resumed(root)
    assert step == 11
    assert "Nothing that is known to have been durable is lost: a kill leaves such an end." in told
    assert "are lost" not in told


def test_a_header_that_a_kill_tears_is_told_as_such(tmp_path):
    states, _ = reference(11)
    root = trained(tmp_path / "run")
    with LocalStore.read(root) as reader:
        record = read_journal(reader, "rank-00000").records[12]
    with open(root / record.path, "r+b") as file:
        file.seek(record.offset + 30)
        file.write(b"torn")
    loop, checkpointer = start(root)
    with checkpointer, pytest.warns(UserWarning, match="a kill leaves such an end"):
        assert checkpointer.resume() == 11
    assert same(loop.state(), states[11])


def test_a_run_of_which_no_base_is_whole_says_that_running_again_does_not_help(tmp_path):
    root = trained(tmp_path / "run")
    for path in (root / "data").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    with (
        start(root)[1] as checkpointer,
        pytest.raises(
            Damaged, match=r"no commit of .* is whole: .*/.*running again finds no more: put files of a copy"
        ),
    ):
        checkpointer.resume()


@pytest.mark.filterwarnings("ignore:.*changed otherwise than by a step")
def test_damage_after_a_step_without_a_record_is_named(tmp_path):
    """Step 5 has a base alone, so the last record that can be read is of step 4."""
    root = tmp_path / "run"
    loop, checkpointer = start(root, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 4)
        with torch.no_grad():
            loop.model.first.weight.mul_(2)
        go_on(loop, checkpointer, 7)
    with LocalStore.read(root) as reader:
        record = read_journal(reader, "rank-00000").records[6]
    with open(root / record.path, "r+b") as file:
        file.seek(record.offset + 30)
        file.write(b"damage")
    with LocalStore.read(root) as reader:
        last, [damage] = verify_records(reader, reader.load(reader.line()[0]))
        assert (last, damage.path, damage.offset) == (5, record.path, record.offset)
    step, told = resumed(root)
    assert step == 5
    assert f"{record.path} holds the header of a record that fails its digest" in told
