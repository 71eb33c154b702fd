"""The engine on a separate device that is played in pure Python: where tensors are, which thread asks for what, memory.

The device is ``played_device.py``; the engine's own ``SeparateDevice`` drives it. What no played device can say (speed,
real kernels, the driver) is in ``tests/gpu``, which has not been run yet.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast import accelerators
from holdfast.cli.machine import choose_device
from holdfast.errors import BadInput, ModelNotSupported
from holdfast.measure.hardware_rates import measure_copies
from holdfast.offload.memory.device import open_device
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.runtime import Step
from holdfast.offload.setup.block_measurement import measure
from plain_loops import PLACEMENTS, model_with_a_frozen_parameter
from played_device import HERE, PLAYED, Played, played  # noqa: F401
from support.grouped import grouped
from training import adamw, batches, decoder, differing, state_of, stored

pytestmark = pytest.mark.usefixtures("played")


@contextmanager
def engine_of(directory, model=None, **options):
    model = model or decoder(blocks=3)
    options = {"dtype": "fp32", "device": "played", "sample": batches(0, 1)[0], "micro_batches": 2} | options
    with holdfast.offload(model, adamw(model), directory, **grouped(**options)) as engine:
        yield engine


def loop_there(steps):
    """Losses of a plain loop whose gradients are computed on the device, and what it trains on the host."""
    model, there = model_with_a_frozen_parameter(), model_with_a_frozen_parameter().to(HERE)
    optimizer, losses = adamw(model, fused=True), []
    for step in range(steps):
        loss = there(**on_device(batches(step, 1)[0]))
        loss.backward()
        losses.append(loss.detach().to("cpu").item())
        for host, device in zip(model.parameters(), there.parameters(), strict=True):
            host.grad, device.grad = None if device.grad is None else device.grad.to("cpu"), None
        optimizer.step()
        with torch.no_grad():
            for host, device in zip(model.parameters(), there.parameters(), strict=True):
                device.copy_(host)
    return losses, state_of(model, optimizer)


def on_device(tree):
    return {name: value.to(HERE) for name, value in tree.items()}


# The engine's own class of a device


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "vertical", **PLACEMENTS["mixed"]},
        {"schedule": "horizontal"},
        {"delayed_fraction": 0.5, "recomputed_fraction": 0.5, "order": "snake"},
    ],
    ids=["vertical", "horizontal", "snake"],
)
def test_training_there_equals_the_plain_loop(tmp_path, options):
    model = model_with_a_frozen_parameter()
    losses, state = loop_there(3)
    with engine_of(tmp_path, model, micro_batches=1, **options) as engine:
        assert [engine.step(batches(step, 1)) for step in range(3)] == losses
    assert differing(stored(tmp_path), state) == []
    assert PLAYED.runtime.pins > 0 and PLAYED.runtime.pinned == {}


def test_threads_say_which_device_is_theirs(tmp_path):
    """Waiting for an event or pinning memory on a thread of device 0 makes a context there."""
    with engine_of(tmp_path) as engine:
        engine.step(batches(0, 2))
        engine.wait()
    assert PLAYED.syncs and PLAYED.runtime.pins
    assert PLAYED.without_device == []


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "horizontal", "clip_norm": 0.5}, {"delayed_fraction": 0.5, "recomputed_fraction": 0.5}],
)
def test_steps_wait_for_events_alone(tmp_path, options):
    with engine_of(tmp_path, **options) as engine:
        given = [[on_device(batch) for batch in batches(step, 2)] for step in range(2)]
        engine.step(given[0])
        PLAYED.hidden_waits.clear()
        engine.step(given[1])
        engine.wait()
        assert PLAYED.hidden_waits == []


def test_who_waits_for_an_event_sleeps(tmp_path):
    with engine_of(tmp_path) as engine:
        engine.step(batches(0, 2))
    assert PLAYED.events and all(PLAYED.events)


def test_choosing_a_device_makes_it_the_threads_own():
    PLAYED.here.is_set = False
    assert choose_device("auto") == "played"
    assert PLAYED.here.is_set
    assert choose_device("cpu") == "cpu"


def test_open_device_takes_the_accelerator():
    assert open_device("auto").torch_device == HERE
    with pytest.raises(BadInput, match="cpu, played:0"):
        open_device("played:7")


def test_accelerators_without_recorded_generators_are_refused(monkeypatch):
    monkeypatch.delattr(type(PLAYED), "get_rng_state_all")
    with pytest.raises(BadInput, match="random numbers of played is not recorded"):
        open_device("played")
    assert open_device("auto").torch_device.type == "cpu"


def test_accelerators_without_streams_are_refused(monkeypatch):
    """As torch.mps is."""
    monkeypatch.delattr(type(PLAYED), "Stream")
    with pytest.raises(BadInput, match="'played' has no streams"):
        open_device("played")


# Where tensors are before and after


def buffers_and_parameters(model):
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


def test_model_works_after_close(tmp_path):
    model = decoder(blocks=3)
    with engine_of(tmp_path, model) as engine:
        engine.step(batches(0, 2))
    assert buffers_and_parameters(model) == {"cpu"}
    assert torch.isfinite(model(**batches(9, 1)[0]))


def test_model_goes_back_to_the_device(tmp_path):
    model = decoder(blocks=3).to(HERE)
    with engine_of(tmp_path, model, sample=on_device(batches(0, 1)[0])) as engine:
        assert engine._plan.memory is not None
        loss = engine.step([on_device(batch) for batch in batches(0, 2)])
    assert buffers_and_parameters(model) == {"played"}
    assert torch.isfinite(model(**on_device(batches(9, 1)[0])).to("cpu"))
    with engine_of(tmp_path / "host", decoder(blocks=3), device="cpu") as engine:
        assert engine.step(batches(0, 2)) == loss


def test_shared_buffer_stays_one(tmp_path):
    model = decoder(blocks=3)
    shared = torch.zeros(3)
    model.register_buffer("one", shared)
    model.blocks[0].register_buffer("other", shared)
    with engine_of(tmp_path, model) as engine:
        assert model.one is model.blocks[0].other and model.one.device == HERE
        engine.step(batches(0, 2))
    assert model.one is model.blocks[0].other and model.one.device.type == "cpu"


def test_given_up_engine_gives_buffers_back(tmp_path):
    model = decoder(blocks=3)
    with engine_of(tmp_path, model) as engine:
        engine.step(batches(0, 2))
        engine.give_up()
        assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


def test_emptied_model_goes_home_by_the_next_engine(tmp_path):
    """The engine that failed has emptied it; the one that resumes the run closes."""
    model = decoder(blocks=3).to(HERE)
    with engine_of(tmp_path, model) as engine:
        engine.step(batches(0, 2))
        engine.give_up()
    with engine_of(tmp_path, model) as engine:
        assert engine.resumed_from is not None
    assert buffers_and_parameters(model) == {"played"}


def test_meta_model_gets_its_buffers_back(tmp_path):
    """Parameters that were on meta stay there."""
    with torch.device("meta"):
        model = decoder(blocks=3)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    model.register_buffer("table", torch.ones(2))
    with engine_of(tmp_path, model) as engine:
        engine.step(batches(0, 2))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


def test_state_dict_is_on_the_host(tmp_path):
    model = decoder(blocks=3)
    model.register_buffer("seen", torch.arange(4.0))
    with engine_of(tmp_path, model) as engine:
        engine.step(batches(0, 2))
        state = engine.state_dict()
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert torch.equal(state["seen"], torch.arange(4.0))


@pytest.mark.parametrize("where", ["sample", "model", "both"])
def test_memory_is_predicted_wherever_things_are(where):
    """The same as for a model and a sample on the host."""
    model, sample = decoder(blocks=3), batches(0, 1)[0]
    model.register_buffer("table", torch.ones(2))
    expected = measure(model, find_blocks(model), sample, torch.float32)
    moved = model.to(HERE) if where != "sample" else model
    given = on_device(sample) if where != "model" else sample
    assert measure(moved, find_blocks(moved), given, torch.float32) == expected


def test_generate_takes_tokens_of_the_device(tmp_path):
    tokens = torch.tensor([[1, 2, 3]])
    with engine_of(tmp_path) as engine:
        here = engine.generate(tokens, 3, temperature=0)
        there = engine.generate(tokens.to(HERE), 3, temperature=0)
    assert there.device == HERE and torch.equal(there.to("cpu"), here)


# Default devices


class Making(nn.Module):
    """A block that makes a tensor wherever the script's default device is."""

    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), seen

    def forward(self, x):
        self.seen.append(torch.zeros(1).device.type)
        return x + self.linear(x)


def test_default_device_is_the_models_alone(tmp_path):
    """What the engine makes is on the host; the model's own code, in blocks and beside them, gets the script's."""
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Making(seen) for _ in range(3))

        def forward(self, x):
            seen.append(torch.zeros(1).device.type)
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.set_default_device("played")
    try:
        options = {"dtype": "fp32", "device": "played", "clip_norm": 1.0}
        with holdfast.offload(model, optimizer, tmp_path, **grouped(**options)) as engine:
            engine.step([(x,)])
            assert set(seen) == {"played"}
            assert {value.device.type for value in engine.state_dict().values()} == {"cpu"}
            engine.evaluate([(x,)])
        assert torch.get_default_device() == HERE
    finally:
        torch.set_default_device(None)


# Random numbers


def test_keyed_rng_keeps_the_device_that_it_seeds(monkeypatch):
    """ "played" alone is the calling thread's current device."""
    kept = []
    monkeypatch.setattr(type(PLAYED), "get_rng_state", lambda self, device=None: kept.append(device))
    with holdfast.keyed_rng(decoder(blocks=3), device="played") as keys:
        assert keys.device == HERE
    assert kept == [HERE]


# Memory


def test_micro_batches_are_there_while_they_compute(tmp_path, monkeypatch):
    """Of an evaluation of many micro-batches those of one pass at most, and none when it is over."""
    sent, alive = [], []

    def count(batch, real=None):
        made = {name: value.to(HERE) for name, value in batch.items()}
        sent.extend(weakref.ref(value) for value in made.values())
        alive.append(sum(ref() is not None for ref in sent))
        return made

    with engine_of(tmp_path) as engine:
        engine._plan = (
            engine._plan
            if engine._plan.evaluation_batches <= 2
            else _with(engine._plan, evaluation_batches=2)
        )
        monkeypatch.setattr(engine._run.device, "take_batch", count)
        engine.evaluate(batches(0, 8))
        gc.collect()
        assert len(alive) == 8 and max(alive) <= 4
        assert not any(ref() is not None for ref in sent)


def _with(plan, **changes):
    from dataclasses import replace

    return replace(plan, **changes)


def of_length(step, length):
    return [{name: value[:, :length].clone() for name, value in batch.items()} for batch in batches(step, 2)]


def test_pinned_memory_is_bounded_where_lengths_vary(tmp_path):
    """At most what was planned and an eighth, and after each length was seen no more is pinned."""
    with engine_of(tmp_path, model=decoder(blocks=3, width=512, hidden=32)) as engine:
        lengths = [8, 3, 5, 7, 2, 6, 4, 1]
        for step, length in enumerate(lengths):
            engine.step(of_length(step, length))
            engine.wait()
        pool = engine._run.residency.pool
        assert pool.pinned_bytes <= 1.13 * engine._plan.memory.pinned_bytes
        assert pool.pinned_bytes == sum(PLAYED.runtime.pinned.values())


def test_failed_pinning_leaves_no_error_behind(tmp_path):
    """The runtime keeps an error for the next who asks, an innocent kernel."""
    PLAYED.runtime.refuses = 2
    with (
        pytest.warns(UserWarning, match=r"cannot be pinned \(CUDA error 2\)") as said,
        engine_of(tmp_path) as engine,
    ):
        engine.step(batches(0, 2))
        engine.wait()
        assert engine._run.residency.pool.pinned_bytes == 0
    assert len(said) == 1 and PLAYED.runtime.last_error == 0


def test_probe_leaves_no_pinned_memory():
    found = measure_copies(HERE, 0.01, nbytes=1 << 16)
    assert found is not None and found.upload > 0
    assert PLAYED.runtime.pins == 2 and PLAYED.runtime.pinned == {}


def test_pinned_memory_is_not_forked(tmp_path):
    """The kernel's own flags of the pages: "dc" is "do not copy on fork"."""
    with engine_of(tmp_path):
        addresses = sorted(PLAYED.runtime.pinned)
        flags = _flags_of(addresses[0])
    assert "dc" in flags


def _flags_of(address):
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            here = start <= address < end
        elif here and first == "VmFlags:":
            return rest
    raise AssertionError("no such pages")


# Waiting


def test_per_block_clipping_waits_once_a_step(tmp_path):
    """Not once a block: the device would be idle while the host looks at each norm."""
    waits = {}
    for clipping in ("per_block", "defer"):
        with engine_of(tmp_path / clipping, clip_norm=0.5, clipping=clipping) as engine:
            engine.step(batches(0, 2))
            engine.wait()
            before = PLAYED.syncs.count("MainThread")
            engine.step(batches(1, 2))
            waits[clipping] = PLAYED.syncs.count("MainThread") - before
    assert waits["per_block"] == waits["defer"]


def test_late_clipping_is_that_of_an_early_decision(tmp_path, monkeypatch):
    """Whether each block is decided on when it is updated, or as soon as its norm is asked for."""
    states = []
    for early in (False, True):
        if early:
            monkeypatch.setattr(Step, "settle_later", lambda step, unit, decide: decide())
        with engine_of(tmp_path / str(early), clip_norm=0.05, clipping="per_block") as engine:
            engine.step(batches(0, 2))
            states.append(engine.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_inputs_under_autocast_are_uploaded_in_time(tmp_path, monkeypatch):
    """Where graphs were to stay, autocast has all blocks computed again; their inputs are not brought while the device
    waits."""
    with engine_of(tmp_path, recomputed_fraction=0.0, activations_on_host=1.0) as engine:
        brought = []
        monkeypatch.setattr(engine._run.device, "bring", lambda t: brought.append(t) or t.to(HERE))
        with torch.autocast("played", dtype=torch.bfloat16):
            engine.step(batches(0, 2))
        engine.wait()
        kinds = {op.key.kind for ops in engine.operations.values() for op in ops}
    assert brought == [] and "upload_input" in kinds


# Warnings and refusals


def test_emulated_bf16_is_warned_of(tmp_path):
    PLAYED.bf16 = False
    with pytest.warns(UserWarning, match="emulates it"), engine_of(tmp_path, dtype="bf16"):
        pass
    with warnings.catch_warnings(), engine_of(tmp_path / "fp32"):
        pass


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("part", ["block", "inside"])
def test_recorded_graphs_of_blocks_are_refused(tmp_path, part):
    model = decoder(blocks=3)
    (model.blocks[1] if part == "block" else model.blocks[1].mlp).compile(mode="reduce-overhead")
    with (
        pytest.raises(ModelNotSupported, match=r"blocks.1 is compiled with mode=\"reduce-overhead\""),
        engine_of(tmp_path, model),
    ):
        pass


def test_parameters_lie_as_a_plain_loops_do():
    """cuBLASLt chooses algorithms by alignment up to 256 bytes."""
    from holdfast.offload.memory.block_states import ALIGN

    assert ALIGN % 256 == 0


def test_what_reads_a_block_from_outside_is_refused(tmp_path):
    model, seen = decoder(blocks=3), []

    def read(*_):
        weight = model.blocks[0].mlp.up.weight
        seen.append((weight.device, weight.dtype))
        return weight.norm()

    model.head.register_forward_pre_hook(read)
    refused = r"blocks\.0\.mlp\.up\.weight was used after blocks\.2"
    with pytest.raises(ModelNotSupported, match=refused), engine_of(tmp_path, model, sample=None) as engine:
        with pytest.raises(ModelNotSupported, match=refused):
            engine.evaluate(batches(0, 1))
        engine.step(batches(0, 1))
    assert seen == [(HERE, torch.float32)] * 2


@pytest.mark.parametrize("recomputed_fraction", [1.0, 0.0])
def test_a_change_through_data_is_refused_before_any_update(tmp_path, recomputed_fraction):
    """It would be lost on the way: the device has a copy of the host's copy."""
    model = decoder(blocks=3)
    refused = r"changed blocks\.0\.mlp\.up\.weight in place"

    def halve(module, _args):
        module.weight.data.mul_(0.5)

    with engine_of(tmp_path, model, recomputed_fraction=recomputed_fraction) as engine:
        before = engine.state_dict()
        model.blocks[0].mlp.up.register_forward_pre_hook(halve)
        with pytest.raises(ModelNotSupported, match=refused):
            engine.evaluate(batches(0, 1))
        with pytest.raises(ModelNotSupported, match=refused):
            engine.step(batches(0, 1))
    found = {key.removesuffix("/param"): value for key, value in stored(tmp_path).items()}
    assert differing(found, before) == []


def test_host_and_device_do_not_mix():
    """The device that is played says so itself, else the tests above could not fail."""
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3).to(HERE) + torch.ones(3)
    assert isinstance(torch.ones(3).to(HERE), Played) and accelerators.devices_of(
        [torch.ones(3).to(HERE)]
    ) == [HERE]
