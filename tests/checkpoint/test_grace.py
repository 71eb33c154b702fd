"""After a SIGTERM only what ends in time is written, and what is left out is said and never acknowledged."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest
import torch
from torch import nn

from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpoint.grace import SigTerm
from holdfast.checkpoint.recording import LogBackend
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput
from holdfast.events import read_events
from holdfast.io.queue import Throttle
from holdfast.store.commit.retention import Keep


class Run:
    """A loop whose record takes 1 MB; it is resumed."""

    def __init__(self, root, grace_seconds, **options):
        torch.manual_seed(0)
        self.root, self.model = root, nn.Linear(500, 500, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(
            root, model=self.model, optimizer=self.optimizer, base_every=1000, grace_seconds=grace_seconds,
            **options,
        )  # fmt: skip
        self.began_at = self.checkpointer.resume()

    def steps(self, count):
        for _ in range(count):
            self.model.weight.grad = torch.ones_like(self.model.weight)
            self.optimizer.step()
            self.checkpointer.step()

    def ended(self):
        """Send a SIGTERM, do one more step, and return the seconds until the process would have ended."""
        os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            self.steps(1)
        assert ended.value.code == 143
        return time.monotonic() - began

    def left_out(self):
        return [
            e["durable_step"] for e in read_events(self.root / "events.jsonl") if e["event"] == "left_out"
        ]


def resumed(root, **options):
    run = Run(root, None, **options)
    run.checkpointer.close()
    return run.began_at, run.model.weight.detach().clone()


def test_what_would_take_longer_is_left_out_and_the_run_goes_on_where_it_was_durable(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("holdfast.checkpointer.tell", told.append)
    run = Run(tmp_path, grace_seconds=1.0)
    run.checkpointer._queue._throttles[True] = Throttle(5_000_000)
    run.steps(4)
    run.checkpointer.wait()
    run.steps(7)
    assert run.ended() < 1.3
    durable = run.checkpointer.durable_step
    assert 4 <= durable < 12 and run.left_out() == [durable]
    assert f"step {durable} is durable. Steps {durable + 1} to 12 are not" in told[-1]
    step, weight = resumed(tmp_path)
    assert durable <= step < 12
    assert torch.allclose(weight, run.model.weight + 0.1 * (12 - step))


def test_records_without_rows_of_zeros_are_judged_by_what_they_take(tmp_path):
    """8 of them take 1 s at this rate, and would take 40 s with all rows."""
    run = Run(tmp_path, grace_seconds=6.0)
    run.checkpointer._queue._throttles[True] = Throttle(200_000)

    def steps(count):
        for _ in range(count):
            run.model.weight.grad = torch.zeros_like(run.model.weight)
            run.model.weight.grad[3] = 1
            run.optimizer.step()
            run.checkpointer.step()

    run.steps = steps
    run.steps(4)
    run.checkpointer.wait()
    run.steps(7)
    assert run.ended() < 6
    assert run.checkpointer.durable_step == 12 and run.left_out() == []


def test_all_is_written_where_there_is_time(tmp_path):
    run = Run(tmp_path, grace_seconds=60)
    run.steps(7)
    run.ended()
    assert run.checkpointer.durable_step == 8 and run.left_out() == []
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")]
    assert resumed(tmp_path)[0] == 8


def test_write_that_hangs_does_not_keep_the_process(tmp_path, monkeypatch):
    run, go = Run(tmp_path, grace_seconds=0.5), threading.Event()
    run.steps(1)
    run.checkpointer.wait()
    recorder = run.checkpointer._backend.recorder
    append = recorder._journal.append
    monkeypatch.setattr(recorder._journal, "append", lambda *args: (go.wait(20), append(*args))[1])
    run.steps(2)
    assert run.ended() < 2
    assert run.checkpointer.durable_step == 1 and run.left_out() == [1] and recorder.is_alive
    go.set()
    recorder._thread.join(20)
    run.checkpointer._let_go()


def test_base_that_would_take_longer_is_left_out(tmp_path, monkeypatch):
    """Residuals are in bases alone, so a close makes one."""
    run = Run(tmp_path, grace_seconds=5, codec=TopK(0.1))
    run.steps(2)
    run.checkpointer.wait()
    monkeypatch.setattr(LogBackend, "_snapshot_rate", lambda self: 100_000.0)
    before = run.checkpointer._backend.base_step
    run.ended()
    assert run.checkpointer._backend.base_step == before == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert resumed(tmp_path, codec=TopK(0.1))[0] == 3


def test_best_base_that_would_take_longer_is_left_out(tmp_path, monkeypatch):
    run = Run(tmp_path, grace_seconds=5, keep=Keep(best=1, metric="loss"))
    run.steps(2)
    run.checkpointer.wait()
    monkeypatch.setattr(LogBackend, "_snapshot_rate", lambda self: 100_000.0)
    os.kill(os.getpid(), signal.SIGTERM)
    run.model.weight.grad = torch.ones_like(run.model.weight)
    run.optimizer.step()
    with pytest.raises(SystemExit):
        run.checkpointer.step(metrics={"loss": 1.0})
    assert run.checkpointer._backend.base_step == 0


def test_step_that_is_waited_for_does_not_take_longer(tmp_path, monkeypatch):
    run, go = Run(tmp_path, grace_seconds=0.5, wait_each_step=True), threading.Event()
    run.steps(1)
    recorder = run.checkpointer._backend.recorder
    append = recorder._journal.append
    monkeypatch.setattr(recorder._journal, "append", lambda *args: (go.wait(5), append(*args))[1])
    assert run.ended() < 2
    assert run.checkpointer.durable_step == 1
    go.set()
    recorder._thread.join(20)
    run.checkpointer._let_go()


def test_step_that_waits_for_the_disk_does_not_wait_beyond_the_seconds(tmp_path, monkeypatch):
    """The disk is so far behind that a step would wait for its staging buffer."""
    run, go = Run(tmp_path, grace_seconds=0.5), threading.Event()
    recorder = run.checkpointer._backend.recorder
    append = recorder._journal.append
    monkeypatch.setattr(recorder._journal, "append", lambda *args: (go.wait(20), append(*args))[1])
    run.steps(8)
    with pytest.warns(UserWarning, match="step 9 was not recorded"):
        assert run.ended() < 2
    assert run.checkpointer.durable_step == 0 == run.left_out()[0]
    go.set()
    recorder._thread.join(20)
    run.checkpointer._let_go()


@pytest.mark.parametrize("options", [{"grace_seconds": 0}, {"grace_seconds": "5"}, {"grace_seconds": True},
                                     {"grace_seconds": 5, "replica": True}])  # fmt: skip
def test_seconds_that_cannot_be_kept_are_refused(tmp_path, options):
    with pytest.raises(BadInput, match="grace_seconds"):
        Run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def in_child(work):
    """The exit code of a fork that does ``work``."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = work() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def signalled_in(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()


def test_a_main_thread_that_never_returns_does_not_keep_a_broken_training(tmp_path):
    """Also one that learns of the loss after the signal. What waits is written first, and may fail."""

    def work(broken_after, finish):
        watcher, began = SigTerm.watched(), time.monotonic()
        watcher.end_if(lambda: time.monotonic() > began + broken_after, finish)
        signalled_in(0.1)
        time.sleep(20)  # the handler runs meanwhile, and the sleep goes on
        return 7

    for broken_after in (0.0, 0.5):
        began, note = time.monotonic(), tmp_path / str(broken_after)
        assert in_child(lambda: work(broken_after, note.touch)) == 143  # noqa: B023
        assert note.exists() and broken_after <= time.monotonic() - began < 10
    assert in_child(lambda: work(0.0, lambda: 1 / 0)) == 143


def test_a_training_that_is_whole_ends_as_it_will():
    def work():
        watcher, is_broken = SigTerm.watched(), []
        watcher.end_if(lambda: bool(is_broken), lambda: None)
        signalled_in(0.1)
        time.sleep(0.5)
        assert watcher.arrived
        watcher.restore()
        is_broken.append(True)
        time.sleep(0.3)
        return 7

    assert in_child(work) == 7


def test_a_training_that_is_closed_meanwhile_ends_as_the_script_wants():
    """The error has reached the script, which may have more to do than to end."""

    def work():
        watcher = SigTerm.watched()
        watcher.end_if(lambda: True, lambda: time.sleep(0.5))
        signalled_in(0.1)
        time.sleep(0.3)
        watcher.restore()
        time.sleep(0.5)
        return 7

    assert in_child(work) == 7


def test_a_rank_that_has_raised_its_own_error_is_not_ended_before_the_script_has_seen_it(
    tmp_path, monkeypatch
):
    """Its failure is on the board as that of another one is."""
    checkpointer = Run(tmp_path / "run", None).checkpointer
    monkeypatch.setattr(checkpointer._backend, "is_broken", lambda: True)
    assert checkpointer._has_lost_another()
    with pytest.raises(ValueError), checkpointer:
        raise ValueError
    assert not checkpointer._has_lost_another()


def test_other_signals_after_a_sigterm_do_no_harm():
    """Where SIGPIPE ends a process, a write for nobody would."""

    def work():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        watcher = SigTerm.watched()
        watcher.end_if(lambda: False, lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGUSR1)
        watcher.restore()
        return 7

    assert in_child(work) == 7


def test_a_handler_that_the_script_sets_later_has_the_signal():
    def work():
        SigTerm.watched().end_if(lambda: True, lambda: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signalled_in(0.1)
        time.sleep(0.5)
        return 7

    assert in_child(work) == 7


def test_the_signal_of_a_fork_is_not_that_of_the_training():
    """As of a worker of a DataLoader. Another use of the descriptor for signals stays as it was."""

    def work():
        watcher = SigTerm.watched()
        watcher.end_if(lambda: True, lambda: None)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        time.sleep(0.3)
        watcher.restore()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        assert signal.set_wakeup_fd(writing) == -1, "given back"
        watcher = SigTerm.watched()
        watcher.end_if(lambda: True, lambda: None)
        signalled_in(0.1)
        time.sleep(0.4)
        assert watcher.arrived and os.read(reading, 1)[0] == signal.SIGTERM
        watcher.restore()
        assert signal.set_wakeup_fd(-1) == writing
        return 7

    assert in_child(work) == 7
