"""A device whose copies go on beside what is computed: the bits of a plain loop, order by events, memory as planned.

There is no device here; ``streams.py`` plays one.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast.io.buffers import BufferPool
from holdfast.offload import api
from holdfast.offload import engine as engine_module
from holdfast.offload.memory.block_states import as_tensor
from holdfast.offload.memory.residency import Gradients, Residency
from holdfast.offload.ops.gradient_ops import reduce
from holdfast.offload.setup import run_planning
from holdfast.optim import host_optimizer
from holdfast.schedule.operations import COMPUTE, DOWNLOAD, UPLOAD, Hold, Key, Op
from holdfast.store.reader import RunReader
from holdfast.store.run_store import LocalStore
from plain_loops import PLACEMENTS, model_with_a_frozen_parameter
from streams import Apart
from support.grouped import grouped
from support.warm_python import environment_of, run_python
from training import adamw, batches, decoder


@pytest.fixture
def apart(monkeypatch):
    """The devices that engines have opened."""
    opened = []

    def open_device(name):
        opened.append(Apart(seed=len(opened)))
        return opened[-1]

    monkeypatch.setattr(run_planning, "open_device", open_device)
    return opened


@contextmanager
def engine_of(directory, num_micro_batches=3, blocks=4, **options):
    model = model_with_a_frozen_parameter(blocks=blocks)
    sample = batches(0, 1)[0]
    with holdfast.offload(
        model,
        adamw(model),
        directory,
        **grouped(dtype="fp32", sample=sample, micro_batches=num_micro_batches, **options),
    ) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("delayed_fraction", [0.0, 0.5])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pinned_memory_is_what_was_planned_and_is_pinned_once(tmp_path, apart, placement, delayed_fraction):
    with engine_of(tmp_path, blocks=6, delayed_fraction=delayed_fraction, **PLACEMENTS[placement]) as engine:
        for step in range(3):
            engine.step(batches(step, 3))
        engine.wait()
        (device,), pool = apart, engine._run.residency.pool
        assert device.pins == len(device.pinned)
        assert 0.7 * engine._plan.memory.pinned_bytes < pool.pinned_bytes
        assert pool.pinned_bytes == sum(device.pinned.values()) <= planned_bytes(engine)
    assert device.pinned == {}


def planned_bytes(engine):
    """What the plan says of pinned memory; inputs here are smaller than the pages that they take."""
    memory, pages = engine._plan.memory, 0
    for op in engine._plan.operations:
        pages += sum(4096 for hold in op.takes if hold.kind in ("inputs", "input_grads"))
    return memory.pinned_bytes + pages


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_the_share_of_delayed_gradients_lies_where_block_inputs_were(unified, delayed):
    """Of a rank beside others, which here is alone: on a separate device, in the memory that is there for both."""
    pool, size = BufferPool(), 3 * 4096
    unit = SimpleNamespace(share_grad_bytes=size, pieces=[], layout=None, grad_bytes=0)
    residency = Residency(pool, [unit], unit, torch.device("cpu"), 0 if unified else 4 * size)
    summed, before = pool.take(size, "gradients"), pool.in_use_bytes
    residency.grads[0] = Gradients(as_tensor(summed), summed, {"w"})
    run = SimpleNamespace(
        device=SimpleNamespace(unified=unified), residency=residency, blocks=[unit], moved=Counter(),
        data_parallel=SimpleNamespace(reduce=lambda unit, all_of_it, share: Gradients(share.fill_(7), None, {"w"})),
    )  # fmt: skip
    kind = "kept_inputs" if delayed else "grads"
    op = Op(Key("reduce_grads", 0), "exchange", takes=(Hold((kind, 0), size),))
    reduce(run, op, SimpleNamespace(shape=SimpleNamespace(clipping="none")))
    flat = residency.grads[0].flat[:size]
    assert (flat == 7).all() and len(flat) == size
    assert pool.in_use_bytes == before - size + (0 if delayed and not unified else size)
    residency.free_grads(0, in_inputs=delayed)
    assert pool.in_use_bytes == before - size


@pytest.mark.slow
@pytest.mark.parametrize("where", ["fill", "put_index"])
def test_nothing_is_pinned_any_more_where_no_engine_was_made(tmp_path, apart, monkeypatch, where):
    pinned = []

    def fail(*_):
        pinned.append(len(apart[0].pinned))
        raise RuntimeError("no engine today")

    monkeypatch.setattr(*((api, where) if where == "fill" else (LocalStore, where)), fail)
    with pytest.raises(RuntimeError, match="no engine today"), engine_of(tmp_path):
        pass
    assert pinned[0] > 0 and apart[0].pinned == {}


@pytest.mark.slow
@pytest.mark.parametrize("lane", [UPLOAD, DOWNLOAD])
def test_a_copy_that_fails_ends_the_run_as_it_was_before(tmp_path, apart, monkeypatch, lane):
    """The driver says so where an event is waited for."""
    with pytest.raises(RuntimeError, match="the device fell off"), engine_of(tmp_path) as engine:
        engine.step(batches(0, 3))
        engine.wait()

        def record(stream, record=Apart._record):
            mark = record(apart[0], stream)
            if stream.name == lane:
                mark.synchronize = fell_off
            return mark

        monkeypatch.setattr(apart[0], "_record", record)
        for step in range(1, 3):
            engine.step(batches(step, 3))
    monkeypatch.undo()
    assert not [
        t for t in threading.enumerate() if t.name.startswith(("holdfast", "played")) and t.is_alive()
    ]
    model = model_with_a_frozen_parameter()
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        assert engine.steps_done >= 1


def fell_off():
    raise RuntimeError("the device fell off the bus")


@pytest.mark.slow
def test_computing_goes_on_while_a_copy_to_the_host_is_under_way(tmp_path, apart):
    """The first copy of gradients is held up until a later block computes; nothing waits for it but what needs it."""
    with engine_of(tmp_path) as engine:
        engine.step(batches(0, 3))
        engine.wait()
        device, go, began = apart[0], threading.Event(), []
        lane = device.lane

        def watched(op):
            if op.key.kind == "download_grads" and not began:
                began.append(op.key.block)
                device._streams[DOWNLOAD].put(lambda: go.wait(10))
            if op.key.kind == "backward" and began and op.key.block < began[0]:
                go.set()
            return lane(op)

        device.lane = watched
        engine.step(batches(1, 3))
        assert began and go.is_set()


@pytest.mark.slow
def test_uploads_are_made_ahead_of_the_computations_that_want_them(tmp_path, apart):
    """While block 1 computes, the parameters of block 2 come."""
    with engine_of(tmp_path, params_on_host=1.0) as engine:
        engine.step(batches(0, 3))
        engine.wait()
        device, order = apart[0], []
        ended = device.ended

        def noted(op):
            order.append((op.key.kind, op.key.block, op.key.micro_batch))
            return ended(op)

        device.ended = noted
        engine.step(batches(1, 3))
        assert order.index(("upload_params", 2, -1)) < order.index(("forward", 1, 2))


@pytest.mark.parametrize(("first", "second"), [*product((COMPUTE, UPLOAD, DOWNLOAD), repeat=2)])
def test_the_played_device_notices_who_does_not_wait(first, second):
    """The pairs of ``ahead`` wait by events; nobody else may begin before what it needs is over."""
    device = Apart(delays=(0.05,))
    device.begins()
    one, two = Op(Key("one"), first), Op(Key("two"), second, needs=(Key("one"),))
    with device.lane(one):
        pass
    device.ended(one)
    with device.lane(two):
        pass
    noticed = bool(device.problems)
    device.close()
    assert noticed is (first != second and (first, second) not in Apart.ahead)


def test_waits_are_for_events_of_the_same_step():
    """What the next step has begun under the same name need not be over."""
    device, first, second = Apart(delays=(0.0,)), object(), object()
    one, two = Op(Key("one"), UPLOAD), Op(Key("two"), DOWNLOAD, needs=(Key("one"),))
    go = threading.Event()
    device.begins()
    with device.of(first), device.lane(one):
        pass
    with device.of(first):
        device.ended(one).result(10)
    device.begins()
    with device.of(second):
        with device.lane(one):
            device._streams[UPLOAD].put(lambda: go.wait(10))
        device.ended(one)
    with device.of(first), device.lane(two):
        pass
    noticed, device.problems[:] = list(device.problems), []
    with device.of(second), device.lane(two):
        pass
    go.set()
    device.close()
    assert noticed == [] and len(device.problems) == 1


def test_helpers_update_beside_a_device_and_end_with_it(tmp_path, monkeypatch):
    """The bits are those of updates by one thread each."""
    monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    monkeypatch.setattr(host_optimizer, "SLICE_ELEMENTS", 4096)
    states = []
    for threads in (1, 2):
        monkeypatch.setattr(
            engine_module, "update_threads", lambda unified, workers, threads=threads: threads
        )
        model = decoder(blocks=2, width=128)
        with holdfast.offload(model, adamw(model), tmp_path / str(threads), precision="fp32") as engine:
            engine.step(batches(0, 2))
            engine.step(batches(1, 2))
            named = [thread.name for thread in threading.enumerate() if "holdfast-fused" in thread.name]
            states.append(engine.state_dict())
        assert len(named) == (2 if threads == 2 else 0)
    left = [thread.name for thread in threading.enumerate()]
    assert not [name for name in left if "holdfast-fused" in name or "holdfast-slices" in name]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


UNCLOSED = """
import sys
import holdfast
from holdfast.offload import engine
from holdfast.offload.setup import run_planning
from holdfast.optim import host_optimizer
from streams import Apart
from training import adamw, batches, decoder

run_planning.open_device, engine.update_threads = lambda name: Apart(), lambda unified, workers: 2
host_optimizer.SLICE_ELEMENTS = 4096
model = decoder(blocks=2, width=128)
made = holdfast.offload(model, adamw(model), sys.argv[1], precision="fp32")
for step in range(3):
    made.step(batches(step, 2))
"""


@pytest.mark.slow
def test_a_script_that_closes_nothing_has_its_last_step(tmp_path):
    """The interpreter ends while helpers have updates to do."""
    (tmp_path / "script.py").write_text(UNCLOSED)
    done = run_python(tmp_path / "script.py", tmp_path / "run", env=environment_of(), timeout=100)
    assert done.returncode == 0, done.stderr
    assert max(commit.step for commit in RunReader(tmp_path / "run").commits()) == 3
