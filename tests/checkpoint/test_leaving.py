"""Copies that are under way when the step returns, as from a CUDA device: the thread that writes waits for them. There
is no device here: one is played, whose copies arrive when somebody waits for them."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from checkpoint.loops import make, same
from holdfast.checkpoint import recording, replicating
from holdfast.checkpoint.capture import staging_buffers
from holdfast.checkpoint.compression.codecs import Exact
from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpoint.log import log_records, recorder
from holdfast.checkpoint.replica import channel, replica_client
from holdfast.checkpointer import Checkpointer
from holdfast.store.commit.retention import Keep

ADAMW = partial(torch.optim.AdamW, lr=0.01)


HERE = torch.device("cpu")


class Device:
    """Copies take what their sources are when they are begun, and arrive when a later mark is waited for. Those into
    slots are on another stream than the others, as where a script steps its optimizer on one."""

    def __init__(self, monkeypatch):
        self.under_way, self.waiters, self.pinned = {"copies": [], "slots": []}, set(), []
        self.reached = lambda: None
        """Called when somebody waits for a mark."""

        def copied(tensor):
            made = torch.empty_like(tensor)
            self.begin("copies", made, tensor.detach())
            return made

        monkeypatch.setattr(staging_buffers, "copied", copied)
        for module in (staging_buffers, log_records, recording, replica_client, replicating):
            monkeypatch.setattr(module, "devices_of", lambda tensors: [HERE])
        for module in (recorder, channel):
            monkeypatch.setattr(module, "use_device", lambda device: None)
        monkeypatch.setattr(staging_buffers, "marks", lambda devices: [Mark(self, "copies")])
        monkeypatch.setattr(staging_buffers, "DeviceCopies", lambda devices: self)
        monkeypatch.setattr(staging_buffers, "pinned", self.pin)

    def pin(self, view, *_):
        self.pinned.append(id(view))
        return partial(self.pinned.remove, id(view))

    devices = (HERE,)

    def send(self, targets, sources, lasting):
        for target, source in zip(targets, sources, strict=True):
            self.begin("slots", target, source)
        return [Mark(self, "slots")]

    def begin(self, stream, target, source):
        now = source.clone()
        target.view(torch.uint8 if target.dim() else target.dtype).fill_(85)
        self.under_way[stream].append(lambda: target.copy_(now))


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


@pytest.mark.parametrize("advice", ["", " /run has to be on a tmpfs"])
def test_refused_pinning_leaves_no_error_behind(monkeypatch, advice):
    """The runtime keeps the error for the next kernel that this thread launches, unless somebody takes it."""

    class Runtime:
        error = 0

        def cudaHostRegister(self, address, nbytes, flags):
            assert address % 4096 == 0 and nbytes % 4096 == 0
            self.error = 2
            return 2

        def cudaGetLastError(self):
            error, self.error = self.error, 0
            return error

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    [layout] = Exact().layouts(state_of(torch.nn.Linear(3, 2)))
    with pytest.warns(UserWarning, match=rf"cannot be pinned \(CUDA error 2\), so training waits.*{advice}"):
        slot = staging_buffers.StagingBuffer(
            [layout], departures=SimpleNamespace(devices=[torch.device("cuda:0")]), advice=advice
        )
    assert runtime.error == 0
    place, source = slot.tensors[0]["weight"], torch.randn(2, 3)
    slot.put([place], [source])
    assert not slot.is_late and torch.equal(place, source)
    slot.free()


def test_staging_buffers_in_host_memory_are_made_when_they_are_needed():
    [layout] = Exact().layouts(state_of(torch.nn.Linear(3, 2)))
    pool = staging_buffers.StagingPool([layout], 2)
    assert pool.slots == []
    first = pool.take()
    pool.give([first])
    assert pool.take() is first and pool.slots == [first]
    assert not pool.serves([layout], 2, [])
    second = pool.take()
    assert second is not first and pool.take() is None
    pool.give([first, second])
    assert pool.serves([layout], 2, []) and not pool.serves([layout], 3, [])
    pool.close()


@pytest.fixture
def pool_with_memory_for(monkeypatch):
    """Makes a pool of up to four staging buffers where the system has memory for so many."""
    pools = []

    def make(number):
        class Short(staging_buffers.Buffer):
            left = number

            def __init__(self, *given):
                if not Short.left:
                    raise OSError(errno.ENOMEM, "Cannot allocate memory")
                Short.left -= 1
                super().__init__(*given)

        monkeypatch.setattr(staging_buffers, "Buffer", Short)
        [layout] = Exact().layouts(state_of(torch.nn.Linear(3, 2)))
        pools.append(staging_buffers.StagingPool([layout], 4))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_no_more_staging_buffers_are_made_than_there_is_memory_for(pool_with_memory_for):
    pool = pool_with_memory_for(2)
    taken = [pool.take(), pool.take()]
    with pytest.warns(UserWarning, match="no memory for more than 2 records"):
        assert pool.take() is None
    assert pool.count == 2 and pool.take() is None
    pool.give(taken)
    assert pool.take() in taken


def test_memory_for_a_single_staging_buffer_is_too_little(pool_with_memory_for):
    pool = pool_with_memory_for(1)
    pool.take()
    with pytest.raises(OSError, match="Cannot allocate"):
        pool.take()


def state_of(model):
    from holdfast.state.live_state import LiveState

    return LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
