"""A replica holds what the trainer holds, bit for bit, after every step; where it does not, that is found and told."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from checkpoint.loops import make, manifests, same
from checkpoint.test_replay import FUSED, OPTIMIZERS, recovered
from combined import one_in
from holdfast.checkpoint import replicating
from holdfast.checkpoint.capture import layer_copies
from holdfast.checkpoint.log.recorder import BOUND
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.replica import replica_process, replica_server, retained_state, shared_memory
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, DiskFull, ReplicaDied, RunLocked, WriterHung
from holdfast.events import read_events
from holdfast.io.queue import Throttle
from holdfast.optim import Joined
from holdfast.state.live_state import LiveState
from holdfast.store.commit.retention import Keep
from holdfast.store.run_store import LocalStore
from replica_run import Forked

STEPS = 9
ADAMW = partial(torch.optim.AdamW, lr=0.01)
HABITS = (
    "", "schedule", "groups", "clip", "clip_norm", "scaler", "accumulate", "unused", "tied", "frozen", "batchnorm",
    "two",
)  # fmt: skip


@pytest.fixture(autouse=True)
def forked(monkeypatch, tmp_path):
    """Replicas are forked, and none is left: neither a process nor anything in its place."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(replica_process, "start_process", Forked)
    monkeypatch.setattr(shared_memory, "MEMORY", memory)
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 100)
    before = set(psutil.Process().children())  # of other tests: a resource tracker, loader workers
    yield
    assert os.listdir(memory) == []
    assert set(psutil.Process().children()) <= before


def start(root, feature="batchnorm", optimizer=ADAMW, **options):
    loop = make(optimizer, "" if feature == "clip_norm" else feature)
    if feature == "clip_norm":
        options["clip_norm"] = 0.1
    checkpointer = Checkpointer(
        root / "run", model=loop.model, optimizer=loop.optimizers, replica=True, **loop.things, **options
    )
    return loop, checkpointer


def events(root, name):
    return [event for event in read_events(root / "run" / "events.jsonl") if event["event"] == name]


def states_of(feature, optimizer=ADAMW, steps=STEPS):
    """Of a loop that has no checkpointer, by the number of calls of ``step`` that count."""
    loop = make(optimizer, "clip" if feature == "clip_norm" else feature)
    states = [loop.state()]
    for i in range(steps):
        loop.iteration(i, lambda: None)
        states.append(loop.state())
    return states


@pytest.mark.slow
@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("feature, name", one_in(5, HABITS, OPTIMIZERS))
def test_the_replica_is_the_trainer_after_every_step(tmp_path, name, feature):
    """Each step is compared in full by digest, and what the replica persisted of it is read back."""
    loop, checkpointer = start(tmp_path, feature, OPTIMIZERS[name], keep=Keep(99))
    with checkpointer:
        checkpointer.resume()
        states = [loop.state()]
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
            states.append(loop.state())
        assert checkpointer.durable_step == STEPS
    assert not events(tmp_path, "drift")
    for step, (found, expected) in enumerate(zip(states, states_of(feature, OPTIMIZERS[name]), strict=True)):
        assert same(found["model"], expected["model"]) and same(found["slots"], expected["slots"]), step
        plain = "" if feature == "clip_norm" else feature
        assert same(recovered(tmp_path / "run", OPTIMIZERS[name], plain, step), found), step


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", [name for name in FUSED if name in OPTIMIZERS])
def test_the_replica_unscales_as_a_fused_optimizer_does_by_itself(tmp_path, name):
    loop, checkpointer = start(tmp_path, "fused scaler", OPTIMIZERS[name], keep=Keep(99))
    with checkpointer:
        checkpointer.resume()
        states = [loop.state()]
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
            states.append(loop.state())
    assert not events(tmp_path, "drift")
    for step, state in enumerate(states):
        assert same(recovered(tmp_path / "run", OPTIMIZERS[name], "fused scaler", step), state), step


# Gradients are taken layer by layer, and what changes later is taken again


def test_gradients_are_copied_while_backward_runs_and_not_again(tmp_path):
    loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        checkpointer.resume()
        order = []
        for name, parameter in loop.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: order.append((name, len(checkpointer._optimizer_hooks._copied)))
            )
        for i in range(4):
            loop.iteration(i, checkpointer.step)
        assert [copied for _, copied in order] == [1, 2, 3, 4] * 4
        assert checkpointer._optimizer_hooks.copied_again == 0


def test_the_last_of_several_micro_batches_is_what_is_copied(tmp_path, monkeypatch):
    copies, real = [], layer_copies._copy_to
    monkeypatch.setattr(layer_copies, "_copy_to", lambda to, grads: (copies.extend(grads), real(to, grads)))
    loop, checkpointer = start(tmp_path, "accumulate")
    with checkpointer:
        checkpointer.resume()
        for i in range(4):
            loop.iteration(i, checkpointer.step)
            assert len(copies) == (16 if i == 0 else 4)  # by then it is known that there are four
            copies.clear()
        assert checkpointer._optimizer_hooks.copied_again == 0


def test_gradients_that_come_after_an_optimizers_step_do_not_change_what_it_consumed(tmp_path):
    """As of a GAN: the second loss has gradients of the first optimizer's parameters as well."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizers = [ADAMW(part.parameters()) for part in model]
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizers, replica=True) as checkpointer:
        checkpointer.resume()
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
                model(torch.randn(4, 3)).pow(2).mean().backward()
                optimizer.step()
            checkpointer.step()
            checkpointer.save()
    assert not events(tmp_path, "drift")


EDITS = [
    lambda p: p.grad.mul_(2),
    lambda p: p.grad.data.mul_(2),
    lambda p: p.grad.numpy().__imul__(2),
    lambda p: setattr(p, "grad", p.grad * 2),
    lambda p: setattr(p, "grad", None),
]


def test_gradients_that_are_changed_after_backward_are_taken_again(tmp_path):
    """In place, out of torch's sight in two ways, by another tensor, and by none: each at two steps in a row."""
    loop, checkpointer = start(tmp_path, "")
    real = loop.optimizers[0].step

    def step():
        for parameter in list(loop.model.parameters())[1:3]:
            EDITS[checkpointer.steps_done // 2](parameter)
        real()

    loop.optimizers[0].step = step
    with checkpointer:
        checkpointer.resume()
        for i in range(2 * len(EDITS)):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
    assert not events(tmp_path, "drift")


class Noisy(torch.optim.Optimizer):
    """Langevin dynamics, by torch's own generator, with a strength that ``step`` is given."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None, strength=0.0):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                noise = torch.randn_like(parameter) * strength
                parameter.sub_(parameter.grad + noise, alpha=self.param_groups[0]["lr"])


def test_a_replica_draws_what_the_trainer_drew_and_is_given_what_it_was_given(tmp_path):
    loop, checkpointer = start(tmp_path, "", Noisy)
    step = loop.optimizers[0].step
    loop.optimizers[0].step = lambda: step(strength=2.0)
    with checkpointer:
        checkpointer.resume()
        for i in range(4):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
    assert not events(tmp_path, "drift")


def test_a_replica_that_ends_in_mid_accumulation_makes_a_base_of_the_last_step(tmp_path):
    loop, checkpointer = start(tmp_path, "batchnorm")
    with checkpointer:
        checkpointer.resume()
        for i in range(4):
            loop.iteration(i, checkpointer.step)
        state = loop.state()["model"]
        loop.model(torch.randn(5, 7), False).sum().backward()
        checkpointer.step()
    assert checkpointer.durable_step == 4 and not events(tmp_path, "drift")
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", 4)["model"], state)


def test_clipping_takes_nothing_twice_and_is_that_of_torch(tmp_path):
    loop, checkpointer = start(tmp_path, "clip_norm")
    with checkpointer:
        checkpointer.resume()
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
        assert checkpointer._optimizer_hooks.copied_again == 0
    assert same(loop.state()["model"], states_of("clip_norm")[-1]["model"])


def test_clip_norm_is_that_of_torch_without_a_replica_too(tmp_path):
    loop = make(ADAMW, "")
    with Checkpointer(
        tmp_path / "run", model=loop.model, optimizer=loop.optimizers, clip_norm=0.1
    ) as checkpointer:
        checkpointer.resume()
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
    assert same(loop.state()["model"], states_of("clip_norm")[-1]["model"])
    assert same(recovered(tmp_path / "run", ADAMW, "", STEPS)["model"], loop.state()["model"])


def test_clipping_by_the_norm_of_all_is_refused_for_several_optimizers_that_step_one_by_one(tmp_path):
    loop = make(ADAMW, "two")
    with pytest.raises(BadInput, match=r"each of 2 optimizers .*holdfast.optim.Joined"):
        Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers, clip_norm=0.1)
    loop.optimizers = [Joined(*loop.optimizers)]
    with Checkpointer(
        tmp_path / "run", model=loop.model, optimizer=loop.optimizers, clip_norm=0.1
    ) as checkpointer:
        checkpointer.resume()


# Drift


@pytest.fixture
def drifting(monkeypatch):
    """The replica's state is changed behind its back after a step."""

    def arm(at, change):
        real = replica_server.apply

        def apply(state, records):
            real(state, records)
            record = records[0].about
            if record["progress"]["things"] == {} and len(done) + 1 == at:
                change(state)
            done.append(record)

        done = []
        monkeypatch.setattr(replica_server, "apply", apply)

    return arm


def one_weight(state):
    state.parameters[1].parameter.data.view(-1)[0] += 1e-3


def one_moment(state):
    state.optimizers[0].state[state.parameters[1].parameter]["exp_avg_sq"].view(-1)[0] += 1e-6


@pytest.mark.parametrize(
    "change, base_every, what", [(one_weight, 99, "fingerprint"), (one_moment, 6, "exp_avg_sq differs")]
)
def test_a_replica_that_has_drifted_is_made_anew_and_told_of(tmp_path, drifting, change, base_every, what):
    """By the fingerprint after every step, or by the full comparison before a base."""
    drifting(6, change)
    states = states_of("batchnorm", steps=20)
    loop, checkpointer = start(tmp_path, base_every=base_every)
    with (
        checkpointer,
        pytest.warns(UserWarning, match=r"the replica has drifted: .* is made anew from the trainer"),
    ):
        checkpointer.resume()
        for i in range(20):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.replica.drain()
    found = events(tmp_path, "drift")
    assert len(found) == 1 and 6 <= found[0]["step"] <= 8 and what in found[0]["what"]
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", 20), states[20])


def test_replica_goes_to_the_host_when_the_device_is_full(tmp_path, monkeypatch):
    """It has no memory for one update. Nothing is lost, and it does not try the device again."""

    def apply(state, records, real=replica_server.apply):
        if len(done) == 3:
            done.append(None)
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(state, records)
        done.append(None)

    def rebuild(about, on_host=False, real=replica_server.rebuild):
        (tmp_path / f"rebuilt-{len(list(tmp_path.glob('rebuilt-*')))}-{on_host}").touch()
        return real(about, on_host)

    done = []
    monkeypatch.setattr(replica_server, "apply", apply)
    monkeypatch.setattr(replica_server, "rebuild", rebuild)
    states = states_of("batchnorm")
    loop, checkpointer = start(tmp_path, base_every=99)
    with checkpointer, pytest.warns(UserWarning, match=r"the device had no memory for step 4"):
        checkpointer.resume()
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.replica.drain()
    assert len(events(tmp_path, "drift")) == 1
    assert sorted(path.name for path in tmp_path.glob("rebuilt-*")) == ["rebuilt-0-False", "rebuilt-1-True"]
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", STEPS), states[STEPS])


@pytest.mark.slow
def test_no_base_is_made_of_a_replica_that_has_drifted(tmp_path, drifting):
    """A change of one moment shows in the full comparison that goes before a base."""
    drifting(4, one_moment)
    loop, checkpointer = start(tmp_path, base_every=99, keep=Keep(99))
    with checkpointer, pytest.warns(UserWarning, match=r"exp_avg_sq differs"):
        checkpointer.resume()
        for i in range(4):
            loop.iteration(i, checkpointer.step)
        checkpointer.save()
        state = loop.state()
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", 4), state)


def test_a_saved_state_is_the_trainers_however_it_was_changed(tmp_path):
    loop, checkpointer = start(tmp_path, keep=Keep(9))
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
        checkpointer.save()
        checkpointer.save()
        assert [event["step"] for event in events(tmp_path, "base")] == [0, 3]
        loop.model.second.weight.data.mul_(2)
        loop.model.first.weight.detach().numpy()[1] *= 3
        checkpointer.save()
        state = loop.state()
        assert [event["step"] for event in events(tmp_path, "base")] == [0, 3, 3]
        for i in range(3, 5):
            loop.iteration(i, checkpointer.step)
    assert not events(tmp_path, "drift")
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", 3), state)
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", 5), loop.state())


# What is refused, what is told, what is left


class Local(torch.optim.SGD):
    """With an attribute that is no hyper-parameter."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counter = 0


def test_what_another_process_cannot_go_on_with_is_refused(tmp_path):
    class Inner(torch.optim.SGD):
        pass

    model = nn.Linear(3, 2)
    options = {"model": model, "replica": True}
    with pytest.raises(BadInput, match="holds counter, which is neither its state nor a hyper-parameter"):
        Checkpointer(tmp_path / "run", optimizer=Local(model.parameters(), lr=0.1), **options)
    with pytest.raises(BadInput, match="another process cannot import"):
        Checkpointer(tmp_path / "run", optimizer=Inner(model.parameters(), lr=0.1), **options)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadInput, match="a replica cannot call after_update"):
        Checkpointer(tmp_path / "run", optimizer=plain, after_update=lambda: None, **options)
    with pytest.raises(BadInput, match="storage = 1GB is for records, and a replica leaves none"):
        Checkpointer(tmp_path / "run", optimizer=plain, storage="1GB", **options)
    with pytest.raises(BadInput, match="is not a directory"):
        Checkpointer(tmp_path / "run", optimizer=plain, model=model, replica=tmp_path / "nowhere")
    with pytest.raises(BadInput, match="clip_norm = 0 must be more than 0"):
        Checkpointer(tmp_path / "run", optimizer=plain, model=model, clip_norm=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_second_trainer_is_refused_while_the_first_one_lives(tmp_path):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        loop.iteration(0, checkpointer.step)
        with pytest.raises(RunLocked, match=f"by this very process .{os.getpid()}."):
            start(tmp_path)[1].resume()
        loop.iteration(1, checkpointer.step)
    assert checkpointer.durable_step == 2


@pytest.mark.slow
def test_the_death_of_the_replica_is_an_error_that_says_what_is_durable(tmp_path):
    loop, checkpointer = start(tmp_path)
    checkpointer.resume()
    for i in range(3):
        loop.iteration(i, checkpointer.step)
    checkpointer.wait()
    checkpointer._backend.replica._helper._process.kill()
    with pytest.raises(
        ReplicaDied, match=r"was ended by signal 9 while training went on\. Step 3 is durable"
    ):
        for i in range(3, 2000):
            loop.iteration(i, checkpointer.step)
    assert checkpointer.replica_step == checkpointer.durable_step == 3
    with pytest.raises(ReplicaDied):
        checkpointer.close()
    assert os.listdir(shared_memory.MEMORY) == []
    loop, again = start(tmp_path)
    with again:
        assert again.resume() == 3


@pytest.mark.slow
def test_a_replica_that_hangs_is_an_error_and_no_hang(tmp_path):
    loop, checkpointer = start(tmp_path)
    checkpointer.resume()
    checkpointer._backend.replica._helper._deadline = 1.0
    checkpointer._backend.replica._helper._channel._socket.settimeout(1.0)
    loop.iteration(0, checkpointer.step)
    os.kill(checkpointer._backend.replica._helper._process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WriterHung, match=r"the replica has said nothing for \d+ s\. Step 0 is durable"):
        for i in range(1, 2000):
            loop.iteration(i, checkpointer.step)
    with pytest.raises(WriterHung):
        checkpointer.close()
    assert time.monotonic() - started < 15


@pytest.fixture
def disk_of(monkeypatch):
    """The replica's writes so many bytes a second."""

    def arm(rate):
        real = replica_server.ReplicaServer._take_place

        def take_place(self):
            real(self)
            self._store.queue._throttles[True] = Throttle(rate, burst_bytes=1)

        monkeypatch.setattr(replica_server.ReplicaServer, "_take_place", take_place)
        monkeypatch.setattr(replica_server, "BEAT_SECONDS", 0.1)  # the deadline is a second or two here

    return arm


@pytest.mark.slow
def test_a_slow_disk_is_waited_for_by_who_waits_and_by_who_closes(tmp_path, disk_of):
    """A base of copies takes longer than the deadline, and each of its units less."""
    disk_of(66_000)
    loop, checkpointer = start(tmp_path, deadline_seconds=1.5, direct=False)
    began = time.monotonic()
    checkpointer.resume()
    assert time.monotonic() - began > 1.5
    loop.iteration(0, checkpointer.step)
    began = time.monotonic()
    checkpointer.close(save=False)
    assert time.monotonic() - began > 1.5
    assert checkpointer.durable_step == 1


@pytest.mark.slow
def test_a_disk_that_takes_nothing_is_an_error(tmp_path, disk_of):
    disk_of(100)
    checkpointer = start(tmp_path, "", deadline_seconds=1.0)[1]
    with pytest.raises(WriterHung, match=r"the replica has said nothing for \d+ s"):
        checkpointer.resume()


@pytest.mark.parametrize("alone, target, takes", [(True, None, True), (True, 3, False), (False, None, False)])
def test_what_was_kept_is_taken_by_one_rank_that_goes_on_from_its_end(monkeypatch, alone, target, takes):
    """Who goes back, and several ranks, have it written first."""
    said, ranks, store = [], SimpleNamespace(alone=alone), SimpleNamespace(commits=list)
    monkeypatch.setattr(replicating, "see_alike", lambda *_: None)
    replica = SimpleNamespace(start=lambda takes: said.append(takes))
    of_them = SimpleNamespace(replica=replica, _training=SimpleNamespace(ranks=ranks))
    assert replicating.ReplicaBackend.enter(of_them, store, SimpleNamespace(target=target)) is None
    assert said == [takes]


@pytest.mark.slow
def test_a_slow_replica_is_waited_for_and_the_wait_is_counted(tmp_path, monkeypatch):
    real = replica_server.apply
    monkeypatch.setattr(replica_server, "apply", lambda *args: (time.sleep(0.2), real(*args)))
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        stalls = []
        for i in range(14):
            loop.iteration(i, checkpointer.step)
            stalls.append(checkpointer.stall_seconds)
            assert checkpointer._backend.replica.pending <= BOUND
        assert sorted(stalls[:6])[3] < 0.1 < sorted(stalls[10:])[1]
        checkpointer.save()
    assert not events(tmp_path, "drift")


def test_a_signal_to_all_processes_does_not_end_the_replica_before_the_trainer(tmp_path):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(checkpointer._backend.replica._helper._process.pid, number)
        for i in range(3):
            loop.iteration(i, checkpointer.step)
    assert checkpointer.durable_step == 3


@pytest.mark.slow
def test_a_failed_write_of_the_replica_is_told_to_the_trainer(tmp_path, monkeypatch):
    real = LocalStore.publish

    def publish(self, step, *rest):
        if self.root.name == "run" and step > 0:
            raise DiskFull("no space left")
        return real(self, step, *rest)

    def keep(*what):
        time.sleep(2)  # as gigabytes take
        real_keep(*what)

    real_keep = retained_state.keep
    monkeypatch.setattr(LocalStore, "publish", publish)
    monkeypatch.setattr(retained_state, "keep", keep)
    loop, checkpointer = start(tmp_path, base_every=3)
    checkpointer.resume()
    with pytest.raises(DiskFull, match="no space left"):
        for i in range(2000):
            loop.iteration(i, checkpointer.step)
            time.sleep(0.002)
    assert checkpointer.durable_step == checkpointer.replica_step == 0
    with pytest.raises(DiskFull):
        checkpointer.close()
    monkeypatch.setattr(LocalStore, "publish", real)
    _loop, again = start(tmp_path)  # what it had is in memory
    with again:
        assert again.resume() >= 3


@pytest.mark.slow
def test_steps_that_were_handed_over_while_a_write_failed_are_kept(tmp_path, monkeypatch):
    real = replica_server.ReplicaServer._begin_base

    def begin_base(self):
        if self._step > 0:
            until = time.monotonic() + 60
            while not (tmp_path / "all_handed_over").exists() and time.monotonic() < until:
                time.sleep(0.01)
            raise DiskFull("no space left")
        real(self)

    monkeypatch.setattr(replica_server.ReplicaServer, "_begin_base", begin_base)
    loop, checkpointer = start(tmp_path, base_every=3)
    checkpointer.resume()
    for i in range(6):
        loop.iteration(i, checkpointer.step)
    assert (checkpointer.durable_step, checkpointer.replica_step) == (0, 6)
    (tmp_path / "all_handed_over").touch()
    with pytest.raises(DiskFull, match="no space left"):
        checkpointer.close()
    monkeypatch.setattr(replica_server.ReplicaServer, "_begin_base", real)
    _loop, again = start(tmp_path)
    with again:
        assert again.resume() == 6


def test_what_survives_is_said_for_each_kind_of_death(tmp_path):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
        assert (checkpointer.durable_step, checkpointer.replica_step) == (0, 3)
        assert not (tmp_path / "run" / "journal").exists() or not any(
            (tmp_path / "run" / "journal").rglob("*.log")
        )
        checkpointer.wait()
        assert (checkpointer.durable_step, checkpointer.replica_step) == (3, 3)


def test_a_parameter_that_is_trained_later_is_handed_over_anew(tmp_path):
    loop = make(ADAMW, "")
    loop.model.second.weight.requires_grad_(False)
    with Checkpointer(
        tmp_path / "run", model=loop.model, optimizer=loop.optimizers, replica=True
    ) as checkpointer:
        checkpointer.resume()
        for i in range(6):
            if i == 3:
                loop.model.second.weight.requires_grad_(True)
            loop.iteration(i, checkpointer.step)
        checkpointer.save()
        state = loop.state()
    assert not events(tmp_path, "drift")
    assert same(recovered(tmp_path / "run", ADAMW, "", 6), state)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_schedule_that_is_moved_after_a_step_is_in_what_save_and_close_make(tmp_path, before, after):
    """With and without a base of the step before that."""

    def begin(**options):
        loop = make(ADAMW, "")
        schedule = torch.optim.lr_scheduler.StepLR(loop.optimizers[0], 1, gamma=0.5)
        run, things = tmp_path / "run", {"model": loop.model, "optimizer": loop.optimizers}
        return loop, schedule, Checkpointer(run, scheduler=schedule, **things, **options)

    loop, schedule, checkpointer = begin(replica=True)
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
        if before:
            checkpointer.save()
        schedule.step()
        if after:
            checkpointer.save()
            assert checkpointer.durable_step == 3
        state, rate = loop.state(), loop.optimizers[0].param_groups[0]["lr"]
    assert not events(tmp_path, "drift")
    loop, schedule, checkpointer = begin()
    with checkpointer:
        assert checkpointer.resume() == 3 and same(loop.state(), state)
    assert (schedule.last_epoch, loop.optimizers[0].param_groups[0]["lr"]) == (1, rate)


@pytest.mark.slow
def test_save_waits_for_its_own_base_where_one_of_the_step_was_under_way(tmp_path, monkeypatch):
    """That one is there when the replica is about to be told of the other, which takes long."""
    publish, send = replica_server.ReplicaServer._publish, replica_process.ReplicaProcess.send

    def publish_slowly(self):
        time.sleep(0.5 if self._step == 3 else 0)
        publish(self)

    def send_late(self, about, data=b""):
        if "again" in about:
            self.wait_for(lambda: self.durable_step == 3)
        send(self, about, data)

    monkeypatch.setattr(replica_server.ReplicaServer, "_publish", publish_slowly)
    monkeypatch.setattr(replica_process.ReplicaProcess, "send", send_late)
    loop = make(ADAMW, "")
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizers[0], 1, gamma=0.5)
    with Checkpointer(
        tmp_path / "run",
        model=loop.model,
        optimizer=loop.optimizers,
        scheduler=schedule,
        replica=True,
        base_every=3,
    ) as checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
        schedule.step()
        checkpointer.save()
        with LocalStore.read(tmp_path / "run") as store:
            newest = store.load(store.line()[0])
        assert (newest.step, newest.progress["things"]["scheduler"]["last_epoch"]) == (3, 1)


class Counting(torch.optim.Optimizer):
    """Each update depends on all parameters, and on a count that is no tensor."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.norm() for p in parameters]).sum()
        for p in parameters:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p.sub_(p.grad / norm / self.state[p]["count"])


def test_an_optimizer_of_the_users_own_with_state_that_is_no_tensor(tmp_path):
    loop, checkpointer = start(tmp_path, "batchnorm", Counting, keep=Keep(99))
    states = {}
    with checkpointer:
        checkpointer.resume()
        for i in range(4):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
            states[i + 1] = loop.state()
    assert not events(tmp_path, "drift")
    for step, state in states.items():
        assert same(recovered(tmp_path / "run", Counting, "batchnorm", step), state)


def one_count(state):
    state.optimizers[0].state[state.parameters[1].parameter]["count"] += 1


def test_drift_of_what_is_no_tensor_is_found_too(tmp_path, drifting):
    drifting(4, one_count)
    loop, checkpointer = start(tmp_path, "batchnorm", Counting)
    with checkpointer, pytest.warns(UserWarning, match="values that are no tensors differs"):
        checkpointer.resume()
        for i in range(4):
            loop.iteration(i, checkpointer.step)
        checkpointer.save()


def test_a_stale_place_of_a_dead_run_is_cleaned(tmp_path):
    place = shared_memory.place_of(tmp_path / "run", shared_memory.MEMORY)
    (place / "sync").mkdir(parents=True, mode=0o700)
    place.chmod(0o700)
    (place / "ring").write_bytes(b"old")
    (place / "state" / "commits").mkdir(parents=True)
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        assert checkpointer.resume() == 0
        loop.iteration(0, checkpointer.step)
        assert sorted(os.listdir(place)) == ["run.json", "socket"]


@pytest.mark.slow
def test_what_was_kept_counts_on_the_runs_current_line_alone(tmp_path):
    loop, checkpointer = start(tmp_path, base_every=2, keep=Keep(9))
    with checkpointer:
        checkpointer.resume()
        for i in range(6):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
    state, place = LiveState(loop.model, loop.optimizers), tmp_path / "place"
    with LocalStore.open(tmp_path / "run", keep=Keep(9)) as store:

        def found(target=None, exact=False):
            own = retained_state.look(place, store)
            fork = retained_state.agreed([own], retained_state.newest(store, target), target, exact)
            return None if fork is None else fork.step

        key = store.timelines()[0][1].key
        assert found() is None
        for step, its_key, counts in ((9, key, True), (6, key, True), (5, key, False), (9, "another", False)):
            retained_state.keep(place, state, step, {"values": {}}, [1, its_key])
            assert found() == (step if counts else None)
        retained_state.keep(place, state, 9, {"values": {}}, [1, key])
        assert [found(8), found(9, exact=True), found(10, exact=True), found(10)] == [None, 9, None, 9]
        store.begin(retained_state.ForkPoint(9, 1, key))  # by a trainer that died then
        assert found() == 9
        store.begin(retained_state.ForkPoint(4, 1, key))
        assert found() is None
    retained_state.drop(place)


def keep_step_5(run, loop, progress):
    """Leave step 5 of ``loop`` in memory, as a replica does whose trainer has died."""
    place = shared_memory.place_of(run, shared_memory.MEMORY)
    with LocalStore.read(run) as reader:
        key = reader.timelines()[0][1].key
    shared_memory.make(place)
    retained_state.keep(place, LiveState(loop.model, loop.optimizers), 5, progress, [1, key])


def test_a_step_that_was_kept_in_memory_alone_is_durable_when_it_is_on_the_disk(tmp_path):
    """As where the disk had no room when the trainer died."""
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
        progress = checkpointer._training.progress()
    keep_step_5(tmp_path / "run", loop, progress)
    loop, again = start(tmp_path)
    with again:
        assert again.resume() == 5 and again.replica_step == 5
        again.wait()
        assert again.durable_step == 5
        with LocalStore.read(tmp_path / "run") as reader:
            assert reader.line()[0].step == 5


def test_a_hyper_parameter_that_the_script_changed_is_told_at_a_resume_from_memory(tmp_path):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        progress = checkpointer._training.progress()
    keep_step_5(tmp_path / "run", loop, progress)
    _, again = start(tmp_path, optimizer=partial(torch.optim.AdamW, lr=0.1))
    with again, pytest.warns(UserWarning, match=r"param_groups\[0\]\['lr'\] is 0.01 and not 0.1"):
        assert again.resume() == 5


@pytest.mark.slow
def test_training_without_a_replica_leaves_no_newer_step_in_memory_behind(tmp_path):
    """It is refused, and what was kept is still there for who takes it, unless the older step is asked for."""
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
        progress = checkpointer._training.progress()

    def keep(step):
        place = shared_memory.place_of(tmp_path / "run", shared_memory.MEMORY)
        with LocalStore.read(tmp_path / "run") as reader:
            timelines = reader.timelines()[0]
        shared_memory.make(place)
        newest = max(timelines)
        retained_state.keep(
            place, LiveState(loop.model, loop.optimizers), step, progress, [newest, timelines[newest].key]
        )
        return place

    def plain():
        loop = make(ADAMW, "batchnorm")
        return Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers, **loop.things)

    keep(5)
    with (
        plain() as alone,
        pytest.raises(BadInput, match=r"kept step 5 in memory, and step 3 is on the disk"),
    ):
        alone.resume()
    with start(tmp_path)[1] as beside:
        assert beside.resume() == 5
    place = keep(9)
    with plain() as alone:
        assert alone.resume(step=5) == 5
    with plain() as alone:  # what was kept is of another line by now
        assert alone.resume() == 5
    shared_memory.remove(place)


def test_what_a_replica_keeps_elsewhere_is_not_left_behind_either(tmp_path):
    aside = tmp_path / "aside"
    aside.mkdir()

    def begun(**options):
        loop = make(ADAMW, "batchnorm")
        model, optimizer = loop.model, loop.optimizers
        return loop, Checkpointer(
            tmp_path / "run", model=model, optimizer=optimizer, **loop.things, **options
        )

    loop, checkpointer = begun(replica=aside)
    with checkpointer:
        checkpointer.resume()
        loop.iteration(0, checkpointer.step)
        progress = checkpointer._training.progress()
    with LocalStore.read(tmp_path / "run") as reader:
        timelines = reader.timelines()[0]
    place = shared_memory.place_of(tmp_path / "run", aside)
    shared_memory.make(place)
    run = [max(timelines), timelines[max(timelines)].key]
    retained_state.keep(place, LiveState(loop.model, loop.optimizers), 5, progress, run)
    with (
        begun()[1] as alone,
        pytest.raises(BadInput, match=r"kept step 5 in memory, and step 1 is on the disk"),
    ):
        alone.resume()


@pytest.fixture
def remembered(tmp_path):
    """The root of a run of 3 steps, of which memory has step 5, as its replica has left it there."""
    root = tmp_path / "first"
    root.mkdir()
    loop, checkpointer = start(root)
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
        progress = checkpointer._training.progress()
    place = shared_memory.place_of(root / "run", shared_memory.MEMORY)
    with LocalStore.read(root / "run") as reader:
        timelines, key = reader.timelines()[0], reader.run_key()
    shared_memory.make(place)
    shared_memory.say_owner(place, root / "run", key)
    run = [max(timelines), timelines[max(timelines)].key]
    retained_state.keep(place, LiveState(loop.model, loop.optimizers), 5, progress, run)
    return root


def resumed(root):
    with start(root)[1] as checkpointer:
        return checkpointer.resume()


@pytest.mark.slow
def test_a_moved_run_finds_its_memory(remembered, tmp_path):
    """By whatever name; and a run that is begun in its old place meanwhile leaves it alone."""
    remembered.rename(tmp_path / "second")
    remembered.mkdir()
    assert resumed(remembered) == 0
    (tmp_path / "link").symlink_to(tmp_path / "second")
    assert resumed(tmp_path / "link") == 5


@pytest.mark.slow
def test_a_copy_leaves_its_originals_memory_alone(remembered, tmp_path):
    shutil.copytree(remembered, tmp_path / "copy")
    assert resumed(tmp_path / "copy") == 3
    assert resumed(remembered) == 5


@pytest.mark.slow
def test_a_run_on_another_disk_reads_its_memory(remembered, tmp_path):
    """Its directory is another one there; what is read stays for a copy that may be the original."""
    shutil.copytree(remembered, tmp_path / "copy")
    remembered.rename(tmp_path / "second")
    loop = make(ADAMW, "batchnorm")
    plain = Checkpointer(
        tmp_path / "copy" / "run", model=loop.model, optimizer=loop.optimizers, **loop.things
    )
    with plain, pytest.raises(BadInput, match="kept step 5 in memory, and step 3 is on the disk"):
        plain.resume()
    with pytest.warns(
        UserWarning, match=r"step 5 was in memory of a replica of this run when that was in .*first/run"
    ):
        assert resumed(tmp_path / "copy") == 5
    assert resumed(tmp_path / "second") == 5


@pytest.mark.slow
def test_a_new_run_in_the_same_inode_leaves_memory_alone(remembered, tmp_path):
    """The run itself, which was moved to another disk, finds its memory there."""
    shutil.copytree(remembered, tmp_path / "second")
    for path in (remembered / "run").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    [place] = shared_memory.MEMORY.iterdir()
    owner = shared_memory.owner_of(place)
    loop, checkpointer = start(remembered)
    with checkpointer:
        assert checkpointer.resume() == 0
        loop.iteration(0, checkpointer.step)
    assert owner is not None and owner.is_at(remembered / "run")
    assert shared_memory.owner_of(place) == owner and os.listdir(shared_memory.MEMORY) == [place.name]
    with pytest.warns(UserWarning, match="step 5 was in memory of a replica of this run"):
        assert resumed(tmp_path / "second") == 5
    shared_memory.remove(place)


@pytest.mark.slow
def test_a_tier_whose_owner_cannot_be_read_is_known_by_its_name(remembered):
    place = shared_memory.place_of(remembered / "run", shared_memory.MEMORY)
    for text in (b"", b"{}", b"[" * 5000, b'{"run": 1, "device": 2, "inode": 3}', b"\xff"):
        (place / shared_memory.OWNER).write_bytes(text)
        assert shared_memory.owner_of(place) is None
    assert resumed(remembered) == 5


def test_a_base_of_a_replica_leads_on_without_the_script(tmp_path):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, checkpointer.step)
    loop = make(ADAMW, "batchnorm")
    model, optimizer = loop.model, loop.optimizers
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, **loop.things) as checkpointer:
        for i in range(checkpointer.resume(), 5):
            loop.iteration(i, checkpointer.step)
    assert compact(tmp_path / "run", 5).base.step == 5


def test_a_place_of_somebody_else_is_refused(tmp_path):
    place = shared_memory.place_of(tmp_path / "run", shared_memory.MEMORY)
    place.mkdir(mode=0o755)
    with pytest.raises(BadInput, match="is not a directory of this user alone"):
        start(tmp_path)[1].resume()
    place.rmdir()


@pytest.mark.slow
def test_a_real_process_outlives_its_session(tmp_path, monkeypatch):
    """Started by its own interpreter, in a session of its own."""
    monkeypatch.undo()
    memory = tmp_path / "memory"
    loop = make(ADAMW, "batchnorm")
    with Checkpointer(
        tmp_path / "run", model=loop.model, optimizer=loop.optimizers, replica=memory
    ) as checkpointer:
        assert checkpointer.resume() == 0
        pid = checkpointer._backend.replica._helper._process.pid
        assert os.getsid(pid) == pid != os.getsid(0)
        loop.iteration(0, checkpointer.step)
    assert checkpointer.durable_step == 1 and not Path(f"/proc/{pid}").exists()


def test_snapshot_of_grown_state_keeps_memory_cap(tmp_path, monkeypatch):
    """Fewer staging buffers fit after the state grew, and no more are made for the next snapshot."""
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        loop.iteration(0, checkpointer.step)
        backend = checkpointer._backend
        monkeypatch.setattr(backend, "_slots_that_fit", lambda: 2)
        backend.adapt()
        backend.save_snapshot(again=True)
        assert len(backend.replica.pool.slots) == 2


@pytest.mark.slow
def test_bases_of_a_replica_name_frozen_files_again(tmp_path):
    """A frozen parameter that the script changes is handed over, and in the base that follows."""
    loop, checkpointer = start(tmp_path, "frozen", keep=Keep(99))
    with checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer.resume()
        for i in range(STEPS):
            with torch.no_grad():
                if i == 3:
                    loop.model.first.bias.add_(1)
                if i == 5:  # the state is handed over, with the same values in what is frozen
                    loop.model.second.weight.add_(1)
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
        state = loop.state()
    found = manifests(tmp_path / "run")[::-1]
    paths = [file.path for base in found for unit, file in base.files.items() if "frozen-" in unit]
    assert len(paths) == len(found) > 5 and len(set(paths)) == 2 and paths == sorted(paths)
    loop, again = start(tmp_path, "frozen")
    with again:
        assert again.resume() == STEPS and same(loop.state()["model"], state["model"])
