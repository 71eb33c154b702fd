"""A run's file system becomes read-only in the middle of training: an error that says so, nothing lost, no hang."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress

import pytest

import holdfast
from checkpoint.loops import cut_small, same
from holdfast.errors import BadInput, DiskFailed
from read_only import make_read_only
from test_checkpointer import go_on, reference, start


def train_on(loop, checkpointer):
    for _ in range(40):
        go_on(loop, checkpointer, checkpointer.steps_done + 1)
        time.sleep(0.02)


def wait(loop, checkpointer):
    go_on(loop, checkpointer, checkpointer.steps_done + 1)
    checkpointer.wait()


def save(loop, checkpointer):
    checkpointer.save()


def close(loop, checkpointer):
    go_on(loop, checkpointer, checkpointer.steps_done + 1)
    checkpointer.close()


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("act", [train_on, wait, save, close])
@pytest.mark.parametrize("base_every", [2, 1000])
def test_a_read_only_file_system_is_an_error_that_says_so_and_loses_nothing(
    tmp_path, monkeypatch, act, base_every
):
    cut_small(monkeypatch, 1)
    states, _ = reference(60)
    loop, checkpointer = start(tmp_path, base_every=base_every, keep=holdfast.Keep(9))
    checkpointer.resume()
    go_on(loop, checkpointer, 7)
    checkpointer.wait()
    started = time.monotonic()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the log of events ends too
        make_read_only(tmp_path, patch.setattr)
        with pytest.raises(DiskFailed, match="Read-only file system"):
            act(loop, checkpointer)
        durable = checkpointer.durable_step
        with suppress(DiskFailed):
            checkpointer.close()
    assert time.monotonic() - started < 10
    assert 7 <= durable < 47
    loop, again = start(tmp_path)
    with again:
        step = again.resume()
        assert step >= durable
        assert same(loop.state(), states[step])
        go_on(loop, again, 60)
    assert same(loop.state(), states[60])


def test_a_run_is_not_begun_on_a_file_system_that_is_read_only(tmp_path, monkeypatch):
    _, checkpointer = start(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(BadInput, match="Read-only file system"):
        make_read_only(tmp_path, patch.setattr)
        checkpointer.resume()
    assert list(tmp_path.iterdir()) == []
    checkpointer.close()
