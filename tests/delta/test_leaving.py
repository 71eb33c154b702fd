"""Copies that are under way when the step returns, as from a CUDA device: the thread that writes waits for them. There
is no device here: one is played, whose copies arrive when somebody waits for them."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from delta.loops import make, same
from holdfast.checkpointer import Checkpointer
from holdfast.delta import leaving, recording, replica, replicating, sealer, slots
from holdfast.delta.codecs import Exact
from holdfast.delta.lossy import TopK
from holdfast.store.retention import Keep

ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Device:
    """Copies take what their sources are when they are begun, and arrive when a later mark is waited for. Those into
    slots are on another stream than the others, as where a script steps its optimizer on one."""

    def __init__(self, monkeypatch):
        self.under_way, self.waiters, self.pinned = {leaving: [], slots: []}, set(), []
        self.reached = lambda: None
        """Called when somebody waits for a mark."""
        real_one = torch.Tensor.copy_

        def copy_each(targets, sources, non_blocking=False):
            for target, source in zip(targets, sources, strict=True):
                copy_one(target, source, non_blocking)

        def copy_one(target, source, non_blocking=False):
            if not non_blocking:
                return real_one(target, source)
            self.begin(slots, target, source, real_one)
            return target

        def copied(tensor):
            made = torch.empty_like(tensor)
            self.begin(leaving, made, tensor.detach(), real_one)
            return made

        monkeypatch.setattr(torch, "_foreach_copy_", copy_each)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_one)
        monkeypatch.setattr(leaving, "copied", copied)
        for module in (leaving, sealer, recording, replica, replicating):
            monkeypatch.setattr(module, "devices_of", lambda tensors: ["a device"])
        for module in (leaving, slots):
            monkeypatch.setattr(module, "marks", partial(self.marks, module))
        monkeypatch.setattr(slots, "pin", lambda view: self.pinned.append(id(view)) or True)
        monkeypatch.setattr(slots, "unpin", lambda view: self.pinned.remove(id(view)))

    def marks(self, stream, devices):
        return [Mark(self, stream)] if devices else []

    def begin(self, stream, target, source, copy):
        now = source.clone()
        copy(target.view(torch.uint8) if target.dim() else target, torch.tensor(85, dtype=torch.uint8))
        self.under_way[stream].append(lambda: copy(target, now))


class Mark:
    def __init__(self, device, stream):
        self.device, self.before = device, device.under_way[stream]
        device.under_way[stream] = []

    def synchronize(self):
        self.device.waiters.add(threading.current_thread().name)
        self.device.reached()
        while self.before:
            self.before.pop(0)()


def train(root, codec, steps=7):
    """The states after each step."""
    loop, states = make(ADAMW, "batchnorm", 0), {}
    with Checkpointer(
        root,
        model=loop.model,
        optimizer=loop.optimizers,
        codec=codec,
        base_every=100,
        keep=Keep(9),
        **loop.things,
    ) as checkpointer:
        checkpointer.resume()
        for i in range(steps):
            loop.iteration(i, checkpointer.step)
            states[i + 1] = loop.state()
            for optimizer in loop.optimizers:
                optimizer.zero_grad(set_to_none=False)
    return states


@pytest.mark.parametrize("codec", [Exact, partial(Exact, compress=True), partial(TopK, 0.2)], ids=str)
def test_records_are_of_what_the_step_had_and_training_waits_for_no_copy(tmp_path, monkeypatch, codec):
    """Gradients, buffers, and the samples of parameters that tell whether replay gave the same."""
    with monkeypatch.context() as patch:
        device = Device(patch)
        states = train(tmp_path, codec())
        assert device.waiters == {"holdfast-recorder"} and not device.pinned
    for step in (6, 4, 1):
        loop = make(ADAMW, "batchnorm", 1)
        with Checkpointer(
            tmp_path, model=loop.model, optimizer=loop.optimizers, codec=Exact(), keep=Keep(9), **loop.things
        ) as again:
            assert again.resume(step=step) == step
            assert same(loop.state(), states[step])


def test_slots_that_cannot_be_pinned_are_waited_for_with_a_warning(tmp_path, monkeypatch):
    """``cudaHostRegister`` says no."""

    class Cudart:
        def cudaHostRegister(self, address, nbytes, flags):
            assert address % 4096 == 0 and nbytes % 4096 == 0 and flags == 0
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    model = torch.nn.Linear(3, 2)
    [layout] = Exact().layouts(state_of(model))
    with pytest.warns(UserWarning, match=r"cannot be pinned \(CUDA error 2\), so training waits"):
        slot = slots.Slot([layout], devices=["a device"])
    assert not slot.non_blocking
    slot.free()


def state_of(model):
    from holdfast.state.live import LiveState

    return LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
