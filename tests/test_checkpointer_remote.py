"""A Checkpointer keeps up a copy of its run in a bucket, beside training and without harm to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from checkpoint.loops import make, same
from holdfast.checkpoint import bucket_copy
from holdfast.checkpoint.replica import replica_process
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, DiskFailed, RunMismatch
from holdfast.events import read_events
from holdfast.store.commit import commit_writer
from holdfast.store.log.chain import verify_records
from holdfast.store.object_store import ObjectDisk
from holdfast.store.pushing import Pusher
from holdfast.store.reader import RunReader
from replica_run import Forked
from test_checkpointer import ADAMW, go_on, reference


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(bucket_copy, "SECONDS", 0.02)


def begin(root, bucket, seed=None, **options):
    loop = make(ADAMW, "batchnorm") if seed is None else make(ADAMW, "batchnorm", seed=seed)
    things = {**loop.things, **options}
    return loop, Checkpointer(root, model=loop.model, optimizer=loop.optimizers, remote=str(bucket), **things)


def until(true, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_what_the_remote_mark_says_can_be_recovered_from_the_bucket_alone(tmp_path, bucket):
    states, losses = reference(12, "batchnorm")
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with checkpointer:
        assert checkpointer.remote_durable_step == -1
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
        checkpointer.wait()
        until(lambda: checkpointer.remote_durable_step == 5)
        again, other = begin(tmp_path / "other", f"{bucket}-other", seed=5)
        with other:
            assert other.resume(source=str(bucket)) == 5
            assert same(again.state(), states[5])
        go_on(loop, checkpointer, 12)
    assert same(loop.state(), states[12]) and loop.losses == losses
    assert checkpointer.remote_durable_step == 12
    reader = RunReader(bucket)
    assert verify_records(reader, reader.head()) == (12, [])


@pytest.mark.slow
def test_a_run_that_goes_on_goes_on_with_its_copy(tmp_path, bucket):
    for steps in (4, 9):
        loop, checkpointer = begin(tmp_path / "run", bucket)
        with checkpointer:
            checkpointer.resume()
            go_on(loop, checkpointer, steps)
    reader = RunReader(bucket)
    assert verify_records(reader, reader.head())[0] == 9 and reader.tip() == 2


def test_what_the_run_does_not_keep_goes_from_the_copy_too(tmp_path, bucket):
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with checkpointer:
        checkpointer.resume()
        for step in (2, 4, 6, 8):
            go_on(loop, checkpointer, step)
            checkpointer.save()
            until(lambda: checkpointer.remote_durable_step == step)  # noqa: B023
    assert [ref.step for ref in RunReader(bucket).commits()] == [8, 6]
    assert RunReader(bucket).commits() == RunReader(tmp_path / "run").commits()


@pytest.mark.slow
def test_a_base_that_was_made_again_is_copied_again(tmp_path, bucket):
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 2)
        checkpointer.save()
        until(lambda: [ref.step for ref in RunReader(bucket).commits()] == [2, 0])
        with torch.no_grad():
            loop.model.first.weight.mul_(0.5)
        checkpointer.save()
    again, other = begin(tmp_path / "other", f"{bucket}-other", seed=5)
    with other:
        assert other.resume(source=str(bucket)) == 2
        assert same(again.state(), loop.state())


def test_an_older_base_that_was_made_again_is_copied_again(tmp_path, bucket, monkeypatch):
    """Until its manifest is there, the records after it count for nothing."""
    loop = make(ADAMW)
    checkpointer = Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers, base_every=100)
    pusher, push_commit = Pusher(tmp_path / "run", bucket), Pusher._push_commit
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 2)
        checkpointer.save()
        assert pusher.push().durable_step == 2
        with torch.no_grad():
            loop.model.first.weight.mul_(0.5)
        with monkeypatch.context() as clock:  # set back
            clock.setattr(commit_writer, "time", SimpleNamespace(time=lambda: 1e9))
            checkpointer.save()
        changed = loop.state()
        go_on(loop, checkpointer, 4)
        checkpointer.save()
        monkeypatch.setattr(Pusher, "_push_commit", lambda *_: None)
        assert pusher.push().durable_step == Pusher(tmp_path / "run", bucket).push().durable_step == 2
        monkeypatch.setattr(Pusher, "_push_commit", push_commit)
        assert pusher.push().durable_step == 4
        assert pusher.push().commits == []
    again = make(ADAMW, seed=5)
    other = Checkpointer(tmp_path / "other", model=again.model, optimizer=again.optimizers)
    with other:
        assert other.resume(source=f"{bucket}@2") == 2
        assert same(again.state(), changed)


def test_a_bucket_that_fails_for_a_while_is_caught_up_with(tmp_path, bucket, monkeypatch):
    put_new, failed = ObjectDisk.put_new, []

    def fails(self, path, data):
        if len(failed) < 3:
            failed.append(path)
            raise DiskFailed("the network is down")
        return put_new(self, path, data)

    monkeypatch.setattr(ObjectDisk, "put_new", fails)
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        until(lambda: len(failed) == 3)
    assert checkpointer.remote_durable_step == 3
    told = [
        event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "push_failed"
    ]
    assert len(told) == 1 and told[0]["error"] == "the network is down"


@pytest.mark.slow
def test_whatever_fails_is_told_and_tried_again(tmp_path, bucket, monkeypatch):
    """Also what nobody has thought of."""
    put_new, failed = ObjectDisk.put_new, []

    def fails(self, path, data):
        if len(failed) < 3:
            failed.append(path)
            raise ValueError("an answer that the library did not understand")
        return put_new(self, path, data)

    monkeypatch.setattr(ObjectDisk, "put_new", fails)
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        until(lambda: checkpointer.remote_durable_step == 3)
    told = [
        event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "push_failed"
    ]
    assert [event["error"] for event in told] == ["ValueError: an answer that the library did not understand"]


def test_a_copy_that_stays_behind_is_told_at_the_end_and_the_run_is_whole(tmp_path, bucket, monkeypatch):
    loop, checkpointer = begin(tmp_path / "run", bucket)
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    monkeypatch.setattr(ObjectDisk, "put_new", lambda *_: (_ for _ in ()).throw(DiskFailed("no network.")))
    go_on(loop, checkpointer, 6)
    with pytest.warns(
        UserWarning, match=r"ends at step -?\d of 6: no network\. To copy what can be: `holdfast push"
    ):
        checkpointer.close()
    reader = RunReader(tmp_path / "run")
    assert verify_records(reader, reader.head()) == (6, [])


def test_error_in_training_does_not_wait_for_a_copy_under_way(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(bucket_copy, "ABORT_WAIT_SECONDS", 0.1)
    put_new, begun, ends = ObjectDisk.put_new, threading.Event(), threading.Event()

    def hangs(self, path, data):
        begun.set()
        assert ends.wait(60)
        return put_new(self, path, data)

    monkeypatch.setattr(ObjectDisk, "put_new", hangs)
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with pytest.raises(ZeroDivisionError), checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 2)
        assert begun.wait(60)
        [copying] = [each for each in threading.enumerate() if each.name == "holdfast-remote"]
        1 / 0  # noqa: B018
    assert copying.is_alive()
    ends.set()
    copying.join()


def test_a_bucket_with_another_run_is_refused_before_anything_is_written(tmp_path, bucket):
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 2)
    _, other = begin(tmp_path / "other", bucket)
    with pytest.raises(RunMismatch, match=f"{bucket} holds a run, and .*other has none yet"):
        other.resume()
    assert not (tmp_path / "other" / "commits").exists()


def test_a_place_that_is_no_bucket_is_refused(tmp_path):
    with pytest.raises(BadInput, match="give s3://BUCKET/PREFIX"):
        begin(tmp_path / "run", tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.parametrize("replica", [False, True])
def test_after_a_sigterm_the_copy_is_complete_when_the_process_ends(tmp_path, bucket, monkeypatch, replica):
    monkeypatch.setattr(bucket_copy, "SECONDS", 60)
    monkeypatch.setattr(replica_process, "start_process", Forked)
    loop, checkpointer = begin(tmp_path / "run", bucket, replica=replica, base_every=100)
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        go_on(loop, checkpointer, 9)
    assert checkpointer.remote_durable_step == checkpointer.steps_done == 4
    again, other = begin(tmp_path / "other", f"{bucket}-other", seed=5)
    with other:
        assert other.resume(source=str(bucket)) == 4
        assert same(again.state(), reference(4, "batchnorm")[0][4])


@pytest.mark.slow
def test_after_a_sigterm_a_bucket_that_does_not_answer_does_not_keep_the_run_from_being_whole(
    tmp_path, bucket, monkeypatch
):
    loop, checkpointer = begin(tmp_path / "run", bucket)
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    with monkeypatch.context() as broken:
        broken.setattr(ObjectDisk, "put_new", lambda *_: (_ for _ in ()).throw(DiskFailed("no network.")))
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.warns(UserWarning, match=r"of 4: no network\."), pytest.raises(SystemExit, match="143"):
            go_on(loop, checkpointer, 9)
    reader = RunReader(tmp_path / "run")
    assert verify_records(reader, reader.head()) == (4, [])
    loop, checkpointer = begin(tmp_path / "run", bucket)
    with checkpointer:
        assert checkpointer.resume() == 4
    assert checkpointer.remote_durable_step == 4
