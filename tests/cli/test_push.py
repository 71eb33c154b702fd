"""``push`` as a person and as a tool call it, and the other verbs on what it copied."""

from __future__ import annotations

import json
import signal
import threading

import pytest

from holdfast.cli import maintenance
from holdfast.errors import Damaged, DiskFailed
from holdfast.store.copying import PushResult
from holdfast.store.log.chain import last_step
from holdfast.store.pushing import Pusher
from holdfast.store.reader import RunReader
from test_checkpointer import go_on, start


@pytest.fixture
def run(tmp_path):
    """Of 5 steps, with bases of 0 and 5."""
    loop, checkpointer = start(tmp_path / "run")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
        checkpointer.save()
    return tmp_path / "run"


def test_a_push_says_what_it_copied_and_what_can_be_recovered(holdfast, run, bucket):
    result = holdfast("push", run, bucket)
    assert result.code == 0, result.err
    first, last = result.out.splitlines()
    assert first.startswith(f"{bucket}: 2 commits, step 0, step 5, and 5 records copied,")
    assert last == "Everything up to step 5 can be recovered from there"
    again = json.loads(holdfast("push", run, bucket, "--json").out)
    assert again["commits"] == [] and again["bytes"] == 0 and again["durable_step"] == 5


@pytest.mark.slow
def test_the_other_verbs_read_the_bucket(holdfast, run, bucket, tmp_path):
    holdfast("push", run, bucket)
    here, there = (json.loads(holdfast("ls", place, "--json").out) for place in (run, bucket))
    assert here == there and [commit["step"] for commit in there] == [5, 0]
    result = holdfast("verify", f"{bucket}@5")
    assert result.code == 0 and result.out.startswith(f"{bucket}@5 is whole")
    assert "parameters" in holdfast("show", bucket).out
    assert holdfast("diff", f"{run}@3", f"{bucket}@3").code == 0
    assert holdfast("diff", f"{run}@5", f"{bucket}@3").code == 1
    out = tmp_path / "out.safetensors"
    assert holdfast("convert", f"{bucket}@4", out, "--to", "safetensors").code == 0
    assert holdfast("diff", f"{run}@4", out).code == 0
    assert holdfast("prune", bucket, "--keep-last", 1, "--dry-run").code == 0


@pytest.mark.parametrize("verb", [("prune", "--keep-last", 1), ("compact",), ("push", "s3://bucket/other")])
def test_what_changes_a_run_is_refused_in_a_bucket(holdfast, run, bucket, verb):
    holdfast("push", run, bucket)
    result = holdfast(verb[0], bucket, *verb[1:])
    assert result.code == 2 and f"{bucket} is in a bucket" in result.err


def test_a_directory_is_no_place_to_push_to(holdfast, run, tmp_path):
    result = holdfast("push", run, tmp_path / "copy")
    assert result.code == 2 and "give s3://BUCKET/PREFIX" in result.err


def test_damage_is_told_and_is_exit_code_1(holdfast, run, bucket):
    reader = RunReader(run)
    path = run / next(iter(reader.load(reader.line()[0]).files.values())).path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = holdfast("push", run, bucket)
    assert result.code == 1 and "Not copied, since it is damaged: " in result.out
    assert holdfast("ls", bucket).code == 0


@pytest.mark.slow
def test_a_followed_run_is_copied_as_it_goes_on(run, bucket, holdfast_process):
    child = holdfast_process("push", run, str(bucket), "--follow", "--json")
    assert json.loads(child.stdout.readline())["durable_step"] == 5
    loop, checkpointer = start(run)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 8)
    too_late = threading.Timer(60, child.kill)
    too_late.start()
    assert 8 in (json.loads(line)["durable_step"] for line in child.stdout)
    too_late.cancel()
    assert newest(bucket) == 8
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) == 0


def test_a_run_is_followed_whatever_the_network_does(run, monkeypatch, capsys):
    """And what was damaged is in the exit code, however it ends."""
    damaged, fails = PushResult(damaged=[Damaged("a.safetensors: a bit")]), DiskFailed("no answer.")
    answers = iter([damaged, fails, fails, PushResult(), fails, KeyboardInterrupt])

    def answer(*_):
        found = next(answers)
        if isinstance(found, PushResult):
            return found
        raise found

    monkeypatch.setattr(maintenance, "SECONDS", 0)
    monkeypatch.setattr(Pusher, "push", answer)
    assert maintenance.push_run(run, "s3://bucket/run", keep_last=None, follow=True, as_json=True) is False
    assert capsys.readouterr().err == 2 * "no answer. It is tried again until Ctrl-C.\n"


def newest(bucket):
    reader = RunReader(bucket)
    return last_step(reader, reader.head())
