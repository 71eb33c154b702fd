"""A replica of a trainer whose gradients come from a device late, and whose updates another device does. There is no
device here: the one of ``test_leaving`` is played, and updates visit a second place on the host."""

from __future__ import annotations

import copy
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from checkpoint.loops import same
from checkpoint.test_leaving import Device
from checkpoint.test_optimizers import OPTIMIZERS as WHOLE
from checkpoint.test_replay import FUSED, OPTIMIZERS, recovered
from checkpoint.test_replica import ADAMW, HABITS, events, forked, start, states_of  # noqa: F401
from holdfast.checkpoint.capture import device_staging
from holdfast.checkpoint.capture.device_staging import StagedOnDevice
from holdfast.checkpoint.capture.layer_copies import LayerHooks
from holdfast.checkpoint.recovery import model_description
from holdfast.checkpoint.recovery.model_description import refuse_what_cannot_be_rebuilt
from holdfast.errors import BadInput
from holdfast.optim import AdamWBF16
from holdfast.state.live_state import LiveState
from holdfast.store.commit.retention import Keep

STEPS = 9


@pytest.fixture
def device(monkeypatch):
    """All parameters are on it, and each visits it by itself."""
    monkeypatch.setattr(model_description, "visited", lambda held: "cpu")
    monkeypatch.setattr(device_staging, "VISIT_BYTES", 1)
    return Device(monkeypatch)


class Gate:
    """Nothing arrives until it is opened."""

    def __init__(self, device):
        self.opened = threading.Event()
        self.open = self.opened.set
        device.reached = self.wait

    def wait(self):
        assert self.opened.wait(30)


CASES = [
    *((name, "batchnorm") for name in {**OPTIMIZERS, **WHOLE} if name != "muon"),
    *(("adamw", feature) for feature in HABITS if feature != "batchnorm"),
    *((name, "fused scaler") for name in FUSED if name in OPTIMIZERS),
]


@pytest.mark.slow
@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("name, feature", CASES)
def test_the_replica_is_the_trainer_after_every_step_and_training_waits_for_no_copy(
    tmp_path, device, name, feature
):
    optimizer = {**OPTIMIZERS, **WHOLE}[name]
    loop, checkpointer = start(tmp_path, feature, optimizer, keep=Keep(99))
    with checkpointer:
        checkpointer.resume()
        assert not isinstance(checkpointer._optimizer_hooks, LayerHooks)
        assert len(device.pinned) == len(checkpointer._backend.pool.slots) * len(loop.optimizers)
        states = [loop.state()]
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
            if i % 3 != 1:
                checkpointer.save()
            states.append(loop.state())
    assert not events(tmp_path, "drift")
    assert device.waiters == {"holdfast-post"} and not device.pinned
    if feature != "fused scaler":
        assert same(states[STEPS]["model"], states_of(feature, optimizer)[STEPS]["model"])
    for step in (0, 1, 3, 4, 6, 7, 9):
        plain = "" if feature == "clip_norm" else feature
        assert same(recovered(tmp_path / "run", optimizer, plain, step), states[step]), step


@pytest.mark.slow
def test_what_is_on_its_way_is_not_said_to_survive_and_no_slot_is_used_again_before(tmp_path, device):
    """More steps than there are slots; that nothing comes for longer than the deadline is not the replica's fault."""
    states = states_of("batchnorm", steps=12)
    loop, checkpointer = start(tmp_path, deadline_seconds=1.0)
    with checkpointer:
        checkpointer.resume()
        pool, gate = checkpointer._backend.pool, Gate(device)
        for i in range(len(pool.slots)):
            assert checkpointer.replica_step == 0 and i < 12
            loop.iteration(i, checkpointer.step)
        assert pool.take() is None and checkpointer.steps_done == len(pool.slots)
        threading.Timer(2.0, gate.open).start()
        for i in range(len(pool.slots), 12):
            loop.iteration(i, checkpointer.step)
            assert gate.opened.is_set()
        checkpointer._backend.drain()
        assert checkpointer.replica_step == 12 and checkpointer.durable_step == 0
    assert device.waiters == {"holdfast-post"} and not events(tmp_path, "drift")
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", 12), states[12])


@pytest.mark.slow
@pytest.mark.parametrize("base_every", [2, 99])
def test_comparisons_and_the_end_come_behind_the_steps_that_are_late(tmp_path, device, base_every):
    """A base is of the step of which the trainer has told, and none is left behind when it closes without one."""
    states = states_of("batchnorm")
    loop, checkpointer = start(tmp_path, base_every=base_every, keep=Keep(99))
    checkpointer.resume()
    device.reached = partial(time.sleep, 0.02)
    for i in range(STEPS):
        loop.iteration(i, checkpointer.step)
    checkpointer.close(save=False)
    assert checkpointer.durable_step == STEPS and not events(tmp_path, "drift") and not device.pinned
    bases = [event["step"] for event in events(tmp_path, "base")]
    assert bases == [0, STEPS] if base_every == 99 else bases[:2] == [0, 2]
    for step in bases:
        assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", step), states[step]), step


def test_what_had_arrived_when_the_device_failed_is_made_durable(tmp_path, device):
    states = states_of("batchnorm")
    loop, checkpointer = start(tmp_path, base_every=99)

    def fail():
        if checkpointer._backend.replica._handed == 5:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="CUDA error"), checkpointer:
        checkpointer.resume()
        device.reached = fail
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
        checkpointer.save()
    assert checkpointer.durable_step == 5 == checkpointer.replica_step
    assert same(recovered(tmp_path / "run", ADAMW, "batchnorm", 5), states[5])


@pytest.mark.parametrize("stays", [{"step"}, set()])
def test_after_a_visit_all_is_where_it_was(stays):
    """What is on the host at a step of the trainer's stays there at the replica's."""
    parameter = nn.Parameter(torch.randn(5, 3).t())
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        expected = torch.optim.AdamW([like := nn.Parameter(parameter.detach().clone())], lr=0.1)
        expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        like.grad = parameter.grad
        before = {slot: (value, value.data_ptr()) for slot, value in optimizer.state[parameter].items()}
        address, stride = parameter.data_ptr(), parameter.stride()
        visit = StagedOnDevice(parameter, optimizer, torch.device("cpu"), stays)
        assert parameter.data_ptr() != address and parameter.stride() == stride
        held = optimizer.state[parameter]
        assert {slot for slot, (value, _) in before.items() if held[slot] is value} == stays & before.keys()
        optimizer.step()
        expected.step()
        visit.end()
        assert (parameter.data_ptr(), parameter.stride()) == (address, stride)
        assert all(
            held[slot].data_ptr() == address for slot, (_, address) in before.items() if slot not in stays
        )
        assert torch.equal(parameter, like) and same(dict(held), dict(expected.state[like]))


@pytest.mark.parametrize(
    "kind, rounds",
    [(torch.optim.AdamW, [["0.weight"], ["0.bias"]]), (AdamWBF16, [["0.weight", "0.bias", "1.weight"]])],
)
def test_a_visit_that_is_broken_off_leaves_all_at_home(device, kind, rounds):
    """Those without a gradient stay, unless all are updated together: it could be that one depends on another."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    part = model_description.rebuild(
        model_description.describe(LiveState(model, [kind(model.parameters(), lr=0.1)]))
    )
    homes = {p.name: p.parameter.data_ptr() for p in part.parameters}

    def away():
        return [p.name for p in part.parameters if p.parameter.data_ptr() != homes[p.name]]

    every = part.rounds(part.optimizers[0], {"0.weight": 1, "0.bias": 1}.keys())
    assert [(names, away()) for names in every] == [(names, names) for names in rounds]
    broken_off = part.rounds(part.optimizers[0], ["0.bias"])
    next(broken_off)
    assert "0.bias" in away()
    broken_off.close()
    assert not away()


def test_parameters_in_several_kinds_of_places_are_refused():
    for first, second in (("cpu", "meta"), ("meta", "meta")):
        model = nn.Sequential(nn.Linear(2, 2, device=first), nn.Linear(2, 2, device=second))
        state = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        with pytest.raises(
            BadInput, match="is on meta, and a replica takes parameters that are all on the host"
        ):
            refuse_what_cannot_be_rebuilt(state)
