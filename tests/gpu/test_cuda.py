"""The engine on a CUDA device: the bits of a loop that computes there and steps on the host, no waiting, memory.

Run with `-m gpu`.
"""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig
from support.grouped import grouped
from training import differing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]

CONFIG = DecoderConfig(blocks=4, width=128, heads=4, kv_heads=2, context=64, dropout=0.0)
STEPS, MICRO_BATCHES = 5, 3


def make() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG)


def engine_of(directory, **options):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return holdfast.offload(model, optimizer, directory, **grouped(device="cuda", **options))


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, 256, (2, 65), generator=generator).cuda() for _ in range(MICRO_BATCHES)]
    return [{"tokens": t[:, :-1], "targets": t[:, 1:]} for t in tokens]


def plain_loop() -> dict[str, torch.Tensor]:
    """Gradients on the device, AdamW on the host."""
    host, device = make(), make().cuda()
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-3, fused=True)
    for step in range(STEPS):
        for batch in batches(step):
            (device(**batch) / MICRO_BATCHES).backward()
        for on_host, on_device in zip(host.parameters(), device.parameters(), strict=True):
            on_host.grad, on_device.grad = on_device.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for on_host, on_device in zip(host.parameters(), device.parameters(), strict=True):
                on_device.copy_(on_host)
    return host.state_dict()


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("on_host", [0.0, 0.5, 1.0])
def test_training_on_the_device_equals_the_plain_loop_bit_for_bit(tmp_path, schedule, on_host):
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = plain_loop()
    places = {"params_on_host": on_host, "optimizer_on_host": on_host, "activations_on_host": on_host}
    assert differing(trained(tmp_path, schedule=schedule, **places), expected) == []


@pytest.mark.parametrize(
    "options",
    [
        {"delayed_fraction": 0.5},
        {"activations_on_host": 0.5, "delayed_fraction": 1.0},
        {"params_on_host": 1.0},
    ],
)
def test_copies_that_come_whenever_they_like_change_no_bit(tmp_path, options):
    """Each copy is late, so that what does not wait for an event comes too early."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert differing(trained(tmp_path, slow=True, **options), plain_loop()) == []


def test_it_computes_on_the_streams_of_its_caller(tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected, streams = plain_loop(), [torch.cuda.Stream(), torch.cuda.Stream()]
    with engine_of(tmp_path, dtype="fp32") as engine:
        for step in range(STEPS):
            given = batches(step)
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[step % 2]):
                engine.step(given)
        engine.wait()
        assert differing(engine.state_dict(), expected) == []


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "horizontal"}, {"clip_norm": 0.5}, {"delayed_fraction": 0.5}]
)
def test_steps_wait_for_events_alone(tmp_path, options):
    """torch raises at each call that would wait for the device otherwise."""
    with engine_of(tmp_path, **options) as engine:
        for step in range(2):
            engine.step(batches(step))
        engine.wait()
        given = [batches(step) for step in range(2, 5)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for micro_batches in given:
                engine.step(micro_batches)
            engine.wait()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.steps_done == 5


@pytest.mark.parametrize(
    "options", [{}, {"params_on_host": 1.0}, {"delayed_fraction": 0.5}, {"activations_on_host": 0.0}]
)
def test_pinned_memory_is_what_was_planned(tmp_path, options):
    with engine_of(tmp_path, sample=batches(0)[0], micro_batches=MICRO_BATCHES, **options) as engine:
        pinned = []
        for step in range(5):
            engine.step(batches(step))
            pinned.append(engine.last["pinned_bytes"])
        planned = engine._plan.memory.pinned_bytes
        assert pinned == sorted(pinned)
        assert 0.5 * planned < pinned[-1] <= 1.02 * planned + 4096 * 100
    assert engine._run.residency.pool.pinned_bytes == 0


def test_memory_that_cannot_be_pinned_is_told_of_and_used_as_it_is(tmp_path, monkeypatch):
    real = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, address, nbytes, flags):
            return 2

        def __getattr__(self, name):
            return getattr(real, name)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=r"cannot be pinned \(CUDA error 2\)"):
        found = trained(tmp_path)
    assert differing(found, plain_loop()) == []


def trained(directory, slow=False, **options):
    """The parameters after ``STEPS`` steps."""
    with engine_of(directory, dtype="fp32", **options) as engine:
        device = engine._run.device
        if slow:
            copy = device._copy
            device._copy = lambda target, source: (torch.cuda._sleep(1_000_000), copy(target, source))
        for step in range(STEPS):
            engine.step(batches(step))
        return engine.state_dict()


def test_device_memory_does_not_grow_with_the_number_of_blocks(tmp_path):
    peaks = []
    for blocks in (4, 16):
        config = DecoderConfig(blocks=blocks, width=512, heads=8, kv_heads=4, context=64, dropout=0.0)
        model = Decoder(config)
        torch.cuda.reset_peak_memory_stats()
        with holdfast.offload(
            model,
            torch.optim.AdamW(model.parameters()),
            tmp_path / str(blocks),
            device="cuda",
            placement=holdfast.Placement(activations_on_host=1.0, recomputed_fraction=1.0),
        ) as engine:
            for step in range(2):
                engine.step(batches(step))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.05 * peaks[0]
