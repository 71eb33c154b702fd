"""A standby's state follows the run: what a takeover still loads and replays, and what it does not trust."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

from checkpoint.loops import cut_small
from holdfast import Checkpointer
from holdfast.checkpoint.recovery import following
from holdfast.errors import HoldfastError, OtherArithmetic, RunMismatch
from holdfast.supervised.attempt import Supervisor
from holdfast.supervised.standing_by import VARIABLE
from support.other_processor import other_processor
from support.switching import copy_often


@pytest.fixture(autouse=True)
def supervised(monkeypatch, tmp_path):
    """Every process of these tests is a standby if its run is locked."""
    folder = tmp_path / "standby"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder / "process-1.jsonl"))
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    with Supervisor(folder):
        yield


class Job:
    """A model with batch norm under a ``Checkpointer``, and steps whose data depend on their number alone."""

    def __init__(self, run, seed=0, device="cpu", **options):
        torch.manual_seed(seed)
        self.device = device
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        options = options or {"base_every": 1000}
        self.ckpt = Checkpointer(run, model=self.model, optimizer=self.optimizer, **options)

    def steps(self, count):
        for _ in range(count):
            torch.manual_seed(100 + self.ckpt.steps_done)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 6).to(self.device)).square().mean().backward()
            self.optimizer.step()
            self.ckpt.step()
            self.ckpt._backend.drain()
        if self.ckpt._backend.records_steps:
            self.ckpt.wait()

    def state(self):
        states = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        return [*self.model.state_dict().values(), *(value for each in states for value in each.values())]

    def equals(self, other):
        pairs = list(zip(self.state(), other.state(), strict=False))
        return len(self.state()) == len(other.state()) and all(
            torch.equal(a.cpu(), b.cpu()) for a, b in pairs
        )


class Standby:
    """A second job that waits in ``resume()`` for the run of another one."""

    def __init__(self, run, exactness="state", **options):
        self.job, self._exactness = Job(run, seed=1, **options), exactness
        self.error = None
        self._thread = threading.Thread(target=self._resume, daemon=True)
        self._thread.start()

    def _resume(self):
        try:
            self.job.ckpt.resume(exactness=self._exactness)
        except BaseException as error:
            self.error = error

    @property
    def reached(self):
        follower = self.job.ckpt._backend._follower
        reached = follower and follower.reached
        return -1 if reached is None else reached.step

    def until(self, true):
        end = time.monotonic() + 20
        while not true():
            assert self.error is None and time.monotonic() < end, self.error
            time.sleep(0.002)

    def takes_over(self):
        self._thread.join(20)
        assert self.error is None and not self._thread.is_alive()
        self.job.ckpt._thread = threading.get_ident()  # from here on this thread trains
        return self.job


def followed(run, steps, **where):
    """A job after ``steps``, and a standby that has followed them."""
    first = Job(run, **where)
    first.ckpt.resume()
    first.steps(steps)
    standby = Standby(run, **where)
    standby.until(lambda: standby.reached == steps)
    return first, standby


@pytest.mark.slow
def test_state_follows_and_a_takeover_loads_nothing(tmp_path):
    first, standby = followed(tmp_path / "run", 3)
    assert standby.job.equals(first)
    first.steps(2)
    standby.until(lambda: standby.reached == 5)
    assert standby.job.equals(first)
    first.ckpt.close()
    job = standby.takes_over()
    assert job.ckpt.steps_done == 5 and job.equals(first)
    assert "followed to step 5, and 0 records replayed" in job.ckpt._backend.recovered_by
    job.steps(3)
    job.ckpt.close()
    whole = Job(tmp_path / "whole")
    whole.ckpt.resume()
    whole.steps(8)
    whole.ckpt.close()
    assert job.equals(whole)


def test_a_standby_of_another_processor_follows_by_request(tmp_path):
    with other_processor():
        first = Job(tmp_path / "run")
        first.ckpt.resume()
        first.steps(3)
    with pytest.warns(UserWarning, match="with the arithmetic of this machine"):
        standby = Standby(tmp_path / "run", exactness="approximate")
        standby.until(lambda: standby.reached == 3)
        first.ckpt.close(save=False)
        job = standby.takes_over()
    assert (job.ckpt.steps_done, job.ckpt.exactness) == (3, "approximate") and not job.equals(first)
    assert "followed to step 3, and 0 records replayed" in job.ckpt._backend.recovered_by
    job.ckpt.close(save=False)


def test_a_standby_of_another_processor_is_refused_the_takeover(tmp_path):
    with other_processor():
        first = Job(tmp_path / "run")
        first.ckpt.resume()
        first.steps(3)
    standby = Standby(tmp_path / "run")
    time.sleep(0.1)  # it looks, and says once why it does not follow
    assert standby.reached == -1
    first.ckpt.close(save=False)
    standby._thread.join(20)
    assert isinstance(standby.error, OtherArithmetic) and standby.error.step == 0


def test_takeover_replays_what_came_since(tmp_path, monkeypatch):
    first, standby = followed(tmp_path / "run", 3)
    monkeypatch.setattr(following.Follower, "_look", lambda self: None)
    first.steps(2)
    first.ckpt.close()
    job = standby.takes_over()
    assert job.ckpt.steps_done == 5 and job.equals(first)
    assert "followed to step 3, and 2 records replayed" in job.ckpt._backend.recovered_by
    job.ckpt.close()


@pytest.mark.parametrize("change", ["base", "timeline"])
def test_state_of_another_line_is_loaded_again(tmp_path, monkeypatch, change):
    first, standby = followed(tmp_path / "run", 3)
    monkeypatch.setattr(following.Follower, "_look", lambda self: None)
    if change == "base":
        first.ckpt.save()
    else:
        first.ckpt.rollback(2)
        torch.manual_seed(7)
        first.model(torch.randn(4, 6)).mean().backward()
        first.optimizer.step()
        first.ckpt.step()
        first.ckpt.wait()
    first.ckpt.close()
    job = standby.takes_over()
    assert job.ckpt.steps_done == 3 and job.equals(first)
    assert " loaded" in job.ckpt._backend.recovered_by
    job.ckpt.close()


@pytest.mark.slow
def test_follower_goes_on_from_a_newer_base(tmp_path):
    first, standby = followed(tmp_path / "run", 2)
    with torch.no_grad():
        first.model[0].weight.mul_(2)  # in no record
    first.ckpt.save()
    first.steps(1)
    standby.until(lambda: standby.reached == 3)
    assert standby.job.equals(first)
    first.ckpt.close()
    standby.takes_over().ckpt.close()


def test_damaged_copy_in_memory_makes_a_takeover_load_everything(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    (tmp_path / "memory").mkdir()
    copy_often(tmp_path / "memory", monkeypatch.setattr)
    first = Job(tmp_path / "run", every="auto")
    first.ckpt.resume()
    first.steps(10)
    at_base = [value.clone() for value in first.state()]
    first.steps(8)
    first.ckpt._backend._copies._wait()
    assert (first.ckpt.durable_step, first.ckpt.replica_step) == (10, 18)
    standby = Standby(tmp_path / "run", every="auto")
    standby.until(lambda: standby.reached == 10)
    *_, file, other = sorted((tmp_path / "memory").glob("*/state/data/*"))  # both slots of the last chunk
    for each in (file, other):
        each.write_bytes(each.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match="copy of step 18 in memory is not whole"):
        first.ckpt.close(save=False)
        job = standby.takes_over()
    assert job.ckpt.steps_done == 10
    assert all(torch.equal(*pair) for pair in zip(job.state(), at_base, strict=True))
    job.ckpt.close(save=False)


def test_emptied_run_is_not_begun_with_what_was_followed(tmp_path):
    first, standby = followed(tmp_path / "run", 2)
    for folder in ("commits", "journal", "timelines", "data", "index"):
        shutil.rmtree(tmp_path / "run" / folder)
    with suppress(HoldfastError):
        first.ckpt.close(save=False)
    standby._thread.join(20)
    assert isinstance(standby.error, RunMismatch) and "was emptied" in str(standby.error)


def test_run_that_cannot_be_followed_is_taken_over_all_the_same(tmp_path, monkeypatch):
    def fail(self):
        raise OSError("made up")

    monkeypatch.setattr(following.Follower, "_look", fail)
    first = Job(tmp_path / "run")
    first.ckpt.resume()
    first.steps(2)
    standby = Standby(tmp_path / "run")
    time.sleep(0.1)
    first.ckpt.close()
    job = standby.takes_over()
    assert job.ckpt.steps_done == 2 and job.equals(first)
    job.ckpt.close()


def test_headers_are_read_once_while_the_log_grows(tmp_path, monkeypatch):
    starts, read = [], following.read_what_can_be
    monkeypatch.setattr(following, "read_what_can_be", lambda *args: starts.append(args[2]) or read(*args))
    first, standby = followed(tmp_path / "run", 3)
    first.steps(2)
    standby.until(lambda: standby.reached == 5)
    assert starts[0] == 0 and len(starts) > 1 and 0 not in starts[1:]
    first.ckpt.close()
    standby.takes_over().ckpt.close()
