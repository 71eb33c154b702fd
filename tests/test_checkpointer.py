"""The checkpointer as a script uses it: what it promises, what it refuses, what it leaves behind."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from checkpoint.loops import cut_small, make, same
from holdfast.checkpoint import options as checkpoint_options
from holdfast.checkpoint.log.recorder import BOUND
from holdfast.checkpoint.replica import shared_memory
from holdfast.checkpoint.training_state import TrainingState
from holdfast.checkpointer import Checkpointer
from holdfast.errors import (
    BadInput,
    DiskFailed,
    DiskFull,
    EngineFailed,
    NoCommit,
    RunLocked,
    RunMismatch,
    WriterHung,
)
from holdfast.events import read_events
from holdfast.io.queue import Throttle
from holdfast.quantities import GiB
from holdfast.state.encoding import decode, encode
from holdfast.store.run_store import LocalStore

ADAMW = partial(torch.optim.AdamW, lr=0.01)


def start(root, feature="batchnorm", **options):
    """A loop and its checkpointer, resumed; the state after each step it takes goes into ``loop.states``."""
    loop = make(ADAMW, feature)
    checkpointer = Checkpointer(root, model=loop.model, optimizer=loop.optimizers, **loop.things, **options)
    return loop, checkpointer


def go_on(loop, checkpointer, steps):
    for i in range(checkpointer.steps_done, steps):
        loop.iteration(i, checkpointer.step)


def reference(steps, feature="batchnorm"):
    """The states of a loop without a checkpointer, by step, and its losses."""
    loop = make(ADAMW, feature)
    states = [loop.state()]
    for i in range(steps):
        loop.iteration(i, loop.things.get("after_update", lambda: None))
        states.append(loop.state())
    return states, loop.losses


# Going on


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize("stop", [1, 4, 5, 9])
@pytest.mark.parametrize("feature", ["", "batchnorm", "schedule", "scaler", "ema", "two", "accumulate"])
def test_a_resumed_loop_ends_as_one_that_never_stopped(tmp_path, feature, stop):
    states, losses = reference(10, feature)
    loop, checkpointer = start(tmp_path, feature, base_every=4)
    with checkpointer:
        assert checkpointer.resume() == 0
        go_on(loop, checkpointer, stop)
        first = loop.losses
    loop, checkpointer = start(tmp_path, feature, base_every=4)
    with checkpointer:
        assert checkpointer.resume() == stop
        assert same(loop.state(), states[stop])
        go_on(loop, checkpointer, 10)
    assert same(loop.state(), states[10])
    assert first + loop.losses == losses


def test_an_earlier_step_is_resumed_and_the_later_ones_are_not_mixed_in(tmp_path):
    states, _ = reference(9)
    loop, checkpointer = start(tmp_path, base_every=3, keep=holdfast.Keep(9))
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 9)
    loop, checkpointer = start(tmp_path, keep=holdfast.Keep(9))
    with checkpointer:
        assert checkpointer.resume(step=4) == 4
        assert same(loop.state(), states[4])
        torch.manual_seed(99)  # another future
        go_on(loop, checkpointer, 6)
        other = loop.state()
    loop, checkpointer = start(tmp_path, keep=holdfast.Keep(9))
    with checkpointer:
        assert checkpointer.resume() == 6
        assert same(loop.state(), other) and not same(other, states[6])


def test_a_base_of_the_step_that_a_resume_came_to_is_made_at_once(tmp_path):
    states, _ = reference(6)
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 4)
    for _ in range(2):
        loop, checkpointer = start(tmp_path)
        with checkpointer:
            assert checkpointer.resume() == 4
            checkpointer.save()
    go_on_from = start(tmp_path)
    with go_on_from[1]:
        assert go_on_from[1].resume() == 4
        go_on(*go_on_from, 6)
    other, again = start(tmp_path)
    with again:
        assert again.resume() == 6 and same(other.state(), states[6])


def test_a_loss_spike_is_left_out(tmp_path):
    states, _ = reference(5)
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        assert checkpointer.resume(before=4) == 3
        assert same(loop.state(), states[3])


def test_the_loader_goes_on_in_mid_epoch_and_across_epochs(tmp_path):
    def run(checkpoint, steps):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = ADAMW(model.parameters())
        data = [(torch.full((3,), float(n)), n) for n in range(7)]
        loader = holdfast.loader(data, batch_size=2, seed=5)
        seen, done, checkpointer = [], 0, None
        if checkpoint:
            checkpointer = Checkpointer(tmp_path, model=model, optimizer=optimizer, loader=loader)
            done = checkpointer.resume()
        for _, (x, numbers) in zip(range(done, steps), loader, strict=False):
            seen.append(numbers.tolist())
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer is not None:
                checkpointer.step()
        if checkpointer is not None:
            checkpointer.close()
        return seen, model.weight.detach().clone()

    whole, weight = run(False, 9)
    first, _ = run(True, 5)
    rest, resumed_weight = run(True, 9)
    assert first + rest == whole
    assert torch.equal(weight, resumed_weight)


def test_other_things_come_back_and_may_not_be_left_out(tmp_path):
    class Best:
        score = 0.0

        def state_dict(self):
            return {"score": self.score}

        def load_state_dict(self, state):
            self.score = state["score"]

    model = nn.Linear(3, 2)
    optimizer = ADAMW(model.parameters())
    best = Best()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, also={"best": best}) as checkpointer:
        checkpointer.resume()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        best.score = 0.5
        checkpointer.step()
    best.score = 9.0
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, also={"best": best}) as checkpointer:
        checkpointer.resume()
        assert best.score == 0.5
    with (
        Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer,
        pytest.raises(RunMismatch, match=r"the run has a best, .* Pass also=\{'best': ...\}"),
    ):
        checkpointer.resume()


def test_a_parameter_that_is_added_or_trained_later_forces_a_base(tmp_path):
    def grow(loop, i):
        if i == 3:
            loop.optimizers[0].add_param_group({"params": [loop.model.first.bias], "lr": 0.5})
        if i == 5:
            loop.model.second.weight.requires_grad_(True)

    def build():
        loop = make(ADAMW, "")
        loop.model.second.weight.requires_grad_(False)
        loop.optimizers[0].param_groups[0]["params"] = [
            p for p in loop.model.parameters() if p is not loop.model.first.bias
        ]
        return loop

    loop, states = build(), []
    with Checkpointer(
        tmp_path, model=loop.model, optimizer=loop.optimizers, keep=holdfast.Keep(9)
    ) as checkpointer:
        checkpointer.resume()
        for i in range(8):
            grow(loop, i)
            loop.iteration(i, checkpointer.step)
            states.append(loop.state())
    for steps in (8, 4):
        loop = build()
        grow(loop, 3)
        grow(loop, 5)
        with Checkpointer(
            tmp_path, model=loop.model, optimizer=loop.optimizers, keep=holdfast.Keep(9)
        ) as checkpointer:
            frozen = (
                nullcontext() if steps == 8 else pytest.warns(UserWarning, match=r"second\.weight: frozen")
            )
            with frozen:
                assert checkpointer.resume(step=steps) == steps
            assert same(loop.state(), states[steps - 1])
    bases = [event["step"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "base"]
    assert bases[:3] == [0, 4, 6]


# Copies


@pytest.mark.slow
def test_a_step_is_what_it_was_whatever_happens_to_its_tensors_afterwards(tmp_path):
    """Three hundred times on a slow disk: gradients and buffers are overwritten right after ``step``."""
    loop, checkpointer = start(tmp_path, base_every=10_000)
    loop.optimizers[0].zero_grad = lambda: None  # they are still there to be overwritten
    states, behind = {}, 0
    with checkpointer:
        checkpointer.resume()
        checkpointer._queue._throttles[True] = Throttle(20_000_000)
        for i in range(300):
            loop.iteration(i, checkpointer.step)
            if i + 1 in (1, 150, 299, 300):
                states[i + 1] = loop.state()
            for p in loop.model.parameters():
                overwrite[i % 3](p.grad)
                p.grad = None
            loop.model.norm.running_mean.data.fill_(float(i))
            loop.model.norm.running_var.numpy().fill(i + 1.0)
            behind += checkpointer.durable_step < checkpointer.steps_done
    assert behind > 150
    for step in sorted(states, reverse=True):
        other, again = start(tmp_path)
        with again:
            assert again.resume(step=step) == step
            assert same(other.state(), states[step])


overwrite = [
    lambda grad: grad.data.fill_(7.0),
    lambda grad: grad.numpy().fill(7.0),
    lambda grad: grad.add_(7.0),
]


# A disk that is slow, full, or gone


@pytest.mark.slow
@pytest.mark.parametrize("when_behind", ["block", "skip"])
def test_steps_that_the_loss_scaler_skips_are_among_those_on_their_way(tmp_path, when_behind):
    """Sixty in a row, each of which takes no memory for gradients, and then others in turn with them."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(30, 7), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    optimizer = ADAMW(model.parameters())
    things = {"model": model, "optimizer": optimizer, "scaler": scaler, "when_behind": when_behind}
    behind = []
    with Checkpointer(tmp_path, **things) as checkpointer, warnings.catch_warnings(record=True) as lost:
        warnings.simplefilter("always")
        checkpointer.resume()
        checkpointer._queue._throttles[True] = Throttle(200_000)
        for i in range(80):
            factor = float("inf") if i < 60 or i % 2 else 1e-20
            scaler.scale(model(torch.randn(3, 30)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            checkpointer.step()
            behind.append(checkpointer.steps_done - checkpointer.durable_step)
            pending = checkpointer._backend.recorder.pending
            assert pending <= BOUND + 1, (i, pending)  # steps, and a base that waits for them
        checkpointer._queue._throttles[True] = Throttle(None)
    assert checkpointer.steps_done == checkpointer.durable_step == 80
    if when_behind == "block":
        assert max(behind) == BOUND and not lost
    else:
        assert any("the disk is behind" in str(each.message) for each in lost)


def test_who_skips_is_told_and_a_base_makes_up_for_it(tmp_path):
    states, _ = reference(60)
    loop, checkpointer = start(tmp_path, when_behind="skip")
    with (
        checkpointer,
        pytest.warns(UserWarning, match=r"step \d+ was not recorded, since the disk is behind"),
    ):
        checkpointer.resume()
        checkpointer._queue._throttles[True] = Throttle(100_000)
        go_on(loop, checkpointer, 30)
        behind = checkpointer.durable_step
        checkpointer._queue._throttles[True] = Throttle(None)
        go_on(loop, checkpointer, 60)
        assert behind < 30
        checkpointer.wait()
        assert checkpointer.durable_step == 60
    other, again = start(tmp_path)
    with again:
        assert again.resume() == 60
        assert same(other.state(), states[60])


def test_a_hung_writer_is_an_error_and_no_hang(tmp_path, monkeypatch):
    loop, checkpointer = start(tmp_path)
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    checkpointer.wait()
    checkpointer._backend.recorder._deadline = 0.5
    release, real = threading.Event(), checkpointer._store.disk.sync
    monkeypatch.setattr(checkpointer._store.disk, "sync", lambda *a, **k: (release.wait(20), real(*a, **k)))
    started = time.monotonic()
    with pytest.raises(WriterHung, match=r"Step 3 is durable, later ones are not"):
        go_on(loop, checkpointer, 40)
    with pytest.raises(WriterHung):
        checkpointer.wait()
    release.set()
    with suppress(WriterHung):
        checkpointer.close()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("failing", ["sync", "allocate"])
@pytest.mark.parametrize("error", [DiskFull("no space left"), DiskFailed("cannot write: Input/output error")])
def test_a_failed_write_is_told_and_the_run_goes_on_from_what_is_durable(
    tmp_path, monkeypatch, failing, error
):
    states, _ = reference(9)
    loop, checkpointer = start(tmp_path)
    checkpointer.resume()
    go_on(loop, checkpointer, 4)
    checkpointer.wait()

    def fail(*_, **__):
        raise error

    checkpointer._backend.recorder._journal.close()  # the next record needs a segment
    monkeypatch.setattr(checkpointer._store.disk, failing, fail)
    with pytest.raises(type(error), match=str(error)):
        for i in range(4, 40):
            loop.iteration(i, checkpointer.step)
            time.sleep(0.02)
    assert checkpointer.durable_step == 4
    monkeypatch.undo()
    with pytest.raises(type(error)):
        checkpointer.close()
    loop, again = start(tmp_path)
    with again:
        assert again.resume() >= 4
        go_on(loop, again, 9)
    assert same(loop.state(), states[9])


@pytest.mark.parametrize("number, error", [(errno.EIO, DiskFailed), (errno.ENOSPC, DiskFull)])
def test_a_record_whose_write_fails_is_told_and_the_run_goes_on_from_what_is_durable(
    tmp_path, monkeypatch, number, error
):
    """The system refuses the write itself, in the middle of a segment that is there."""
    states, _ = reference(9)
    loop, checkpointer = start(tmp_path)
    checkpointer.resume()
    go_on(loop, checkpointer, 4)
    checkpointer.wait()
    real, refused = os.pwritev, []

    def write(fd, buffers, offset):
        if "/journal/" in (path := os.readlink(f"/proc/self/fd/{fd}")):
            refused.append(path)
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    with pytest.raises(error, match=r"step-0+1\.t0001\.log"):
        for i in range(4, 40):
            loop.iteration(i, checkpointer.step)
            time.sleep(0.02)
    monkeypatch.undo()
    assert refused and checkpointer.durable_step == 4
    with pytest.raises(error):
        checkpointer.close()
    loop, again = start(tmp_path)
    with again:
        assert again.resume() == 4
        assert same(loop.state(), states[4])
        go_on(loop, again, 9)
    assert same(loop.state(), states[9])


# What is refused, and what is left


def test_nothing_is_left_behind(tmp_path):
    loop, checkpointer = start(tmp_path)
    hooks = [dict(optimizer._optimizer_step_pre_hooks) for optimizer in loop.optimizers]
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    checkpointer.close()
    checkpointer.close()
    assert [dict(optimizer._optimizer_step_pre_hooks) for optimizer in loop.optimizers] == hooks
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")]
    with pytest.raises(EngineFailed, match="is closed"):
        checkpointer.step()
    loop.iteration(3, lambda: None)  # the loop goes on without it
    start(tmp_path)[1].close()


def test_another_pre_hook_comes_first(tmp_path):
    """What is recorded is what the optimizer consumes, whoever registers later."""
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        loop.iteration(0, checkpointer.step)
        loop.optimizers[0].register_step_pre_hook(triple)
        states = {}
        for i in range(1, 5):
            loop.iteration(i, checkpointer.step)
            states[i + 1] = loop.state()
    for step in (5, 4, 3, 2):
        other, again = start(tmp_path)
        with again:
            assert again.resume(step=step) == step
            assert same(other.state(), states[step])


def triple(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(3)


def test_sigterm_makes_the_step_durable_and_ends_the_process(tmp_path):
    states, _ = reference(4)
    loop, checkpointer = start(tmp_path)
    assert checkpointer.resume() == 0
    go_on(loop, checkpointer, 3)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        go_on(loop, checkpointer, 9)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    other, again = start(tmp_path)
    with again:
        assert again.resume() == 4
        assert same(other.state(), states[4])


def test_a_handler_of_the_script_is_left_alone(tmp_path):
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda *_: arrived.append(1))
    try:
        loop, checkpointer = start(tmp_path)
        with checkpointer:
            checkpointer.resume()
            os.kill(os.getpid(), signal.SIGTERM)
            go_on(loop, checkpointer, 3)
        assert arrived and checkpointer.durable_step == 3
    finally:
        signal.signal(signal.SIGTERM, before)


class Orthogonal(torch.optim.Optimizer):
    """Each update depends on all parameters: by their common norm."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.norm() for p in parameters]).sum()
        for p in parameters:
            self.state[p].setdefault("count", 0)
            self.state[p]["count"] += 1
            p.sub_(p.grad / norm / self.state[p]["count"])


@pytest.mark.parametrize("memory", ["1GiB", "270MB"])
def test_an_optimizer_that_is_not_elementwise_gets_bases_of_one_step(tmp_path, monkeypatch, memory):
    cut_small(monkeypatch)
    loop, states = make(Orthogonal, "batchnorm"), []
    with Checkpointer(
        tmp_path,
        model=loop.model,
        optimizer=loop.optimizers,
        base_every=3,
        keep=holdfast.Keep(9),
        memory=memory,
    ) as checkpointer:
        if memory == "270MB":
            checkpointer._backend.staging_bytes = 1  # no room for a copy of everything
        checkpointer.resume()
        for i in range(8):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()  # a base is published before the next is due
            states.append(loop.state())
    with LocalStore.read(tmp_path) as reader:
        manifests = [reader.load(ref) for ref in reader.commits()]
        assert len(manifests) > 1 and all(m.oldest_step == m.step for m in manifests)
    for step in (8, 5, 3):
        other = make(Orthogonal, "batchnorm", seed=1)
        with Checkpointer(
            tmp_path, model=other.model, optimizer=other.optimizers, keep=holdfast.Keep(9)
        ) as again:
            assert again.resume(step=step) == step
            assert same(other.state(), states[step - 1])


def closure_step(loop, checkpointer):
    checkpointer.resume()
    loop.optimizers[0].step(lambda: 0.0)


def sparse_step(loop, checkpointer):
    checkpointer.resume()
    for p in loop.model.parameters():
        p.grad = torch.zeros(p.shape).to_sparse()
    loop.optimizers[0].step()


@pytest.mark.parametrize(
    "act, message",
    [
        (closure_step, "with a closure"),
        (sparse_step, "is sparse"),
        (lambda loop, checkpointer: checkpointer.step(), r"call resume\(\) before the first step"),
        (lambda loop, checkpointer: (checkpointer.resume(), checkpointer.resume()), "called once"),
        (lambda loop, checkpointer: checkpointer.resume(step=1, before=2), "not both"),
        (lambda loop, checkpointer: checkpointer.resume(step=3), "has no step yet"),
        (lambda loop, checkpointer: checkpointer.resume(step="3"), r"step='3'.*number of a step, at least 0"),
        (lambda loop, checkpointer: checkpointer.resume(step=-1), r"step=-1.*at least 0"),
        (lambda loop, checkpointer: checkpointer.resume(before=0), r"before=0.*at least 1"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, act, message):
    loop, checkpointer = start(tmp_path, feature="")
    with pytest.raises(BadInput, match=message):
        act(loop, checkpointer)
    checkpointer.close()


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"loader": torch.utils.data.DataLoader([1])},
            r"loader: DataLoader has no state_dict .* holdfast\.loader",
        ),
        ({"also": {"scaler": torch.amp.GradScaler("cpu")}}, "as scaler: give it as scaler="),
        ({"also": {"things": 1}}, "things: int has no state_dict"),
        ({"optimizer": []}, "not an optimizer"),
        ({"base_every": 0}, "base_every = 0"),
        ({"base_every": 2.5}, "base_every = 2.5 must be whole steps"),
        ({"when_behind": "panic"}, "when_behind = 'panic'"),
        ({"memory": "1KB"}, "memory = 1000 B is too little: .* Give at least"),
    ],
)
def test_bad_input_is_refused_with_nothing_written(tmp_path, options, message):
    model = nn.Linear(2, 2)
    given = {"model": model, "optimizer": ADAMW(model.parameters())} | options
    with pytest.raises(BadInput, match=message):
        Checkpointer(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("every", [1, 3, "auto"])
def test_memory_that_the_machine_does_not_have_is_refused_with_nothing_written(tmp_path, monkeypatch, every):
    """Buffers of records are made when they are first needed, so the first steps would show it, or no step."""
    model = nn.Linear(1000, 1000)
    ring_bytes, parameter_bytes = (0 if every == 3 else BOUND * 4_000_000), 4_000_000
    given = {"model": model, "optimizer": ADAMW(model.parameters()), "every": every, "memory": "1GB"}
    monkeypatch.setattr(checkpoint_options, "free_host_bytes", lambda: ring_bytes + parameter_bytes)
    with pytest.raises(BadInput, match=r"memory = .* is more than .* has: .* and .* are free"):
        Checkpointer(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    with monkeypatch.context() as standby:  # which will have the memory of the process that trains
        standby.setenv("HOLDFAST_STANDBY", str(tmp_path / "status"))
        Checkpointer(tmp_path / "run", **given).close()
    monkeypatch.setattr(checkpoint_options, "free_host_bytes", lambda: 2 * (ring_bytes + parameter_bytes))
    Checkpointer(tmp_path / "run", **given).close()


def test_memory_that_nobody_gave_is_what_the_machine_has(tmp_path, monkeypatch):
    """With two buffers at least, and a warning, as a run that has trained on this machine must go on."""
    model = nn.Linear(1000, 1000, bias=False)
    for free_bytes, count in ((4 * 4_100_000, 3), (1000, 2), (4 * GiB, BOUND)):
        monkeypatch.setattr(checkpoint_options, "free_host_bytes", lambda free=free_bytes: free)
        warns = (
            pytest.warns(UserWarning, match="is more than .* fewer buffers")
            if count < BOUND
            else nullcontext()
        )
        with warns:
            checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=ADAMW(model.parameters()))
        with checkpointer:
            checkpointer.resume()
            assert checkpointer._backend.pool.count == count


def test_a_ring_that_a_replica_still_has_is_not_counted_again(tmp_path, monkeypatch):
    model = nn.Linear(1000, 1000, bias=False)
    given = {"model": model, "optimizer": ADAMW(model.parameters()), "replica": tmp_path, "memory": "1GB"}
    monkeypatch.setattr(checkpoint_options, "free_host_bytes", lambda: 5_000_000)  # of 36 MB
    with pytest.raises(BadInput, match="is more than"):
        Checkpointer(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    ring = shared_memory.place_of(tmp_path / "run", tmp_path) / "ring"
    ring.parent.mkdir()
    ring.write_bytes(bytes(BOUND * 4_000_000))
    Checkpointer(tmp_path / "run", **given).close()


def test_another_model_or_a_second_writer_is_refused(tmp_path):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 2)
        with pytest.raises(RunLocked, match=r"this very process .* close\(\) that first"):
            start(tmp_path)[1].resume()
    model = nn.Linear(3, 3)
    with pytest.raises(RunMismatch, match="another model: of weight/param it has none"):
        Checkpointer(tmp_path, model=model, optimizer=ADAMW(model.parameters())).resume()
    with pytest.raises(NoCommit, match="cannot be brought to step 9: after step 2"):
        start(tmp_path)[1].resume(step=9)


def test_a_log_stays_with_its_run_wherever_the_script_goes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loop, checkpointer = start("run")
    monkeypatch.chdir("elsewhere")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 1)
    assert (tmp_path / "run" / "events.jsonl").exists() and not list((tmp_path / "elsewhere").iterdir())


def test_a_run_in_a_bucket_is_refused_at_once():
    with pytest.raises(BadInput, match="s3://bucket/run is in a bucket"):
        start("s3://bucket/run")


def test_a_constructor_that_fails_leaves_no_hook_active(tmp_path, monkeypatch):
    let_go = []
    monkeypatch.setattr(TrainingState, "release", lambda self: let_go.append(self))
    with pytest.raises(BadInput):
        start(tmp_path, memory=10)
    assert len(let_go) == 1


class Named(dict):
    """Of somebody's own."""


@pytest.mark.parametrize("value", [Named()])
def test_a_dict_that_would_come_back_as_another_is_refused(value):
    with pytest.raises(BadInput, match=type(value).__name__):
        encode(value)


def test_a_number_of_numpy_comes_back_as_one():
    back = decode(encode(np.float64(0.1)))
    assert type(back) is np.float64 and back == 0.1
