"""The engine on a CUDA device, against a loop that computes there and steps on the host. Run with `-m gpu`."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CONFIG = DecoderConfig(blocks=4, width=128, heads=4, kv_heads=2, context=64, dropout=0.0)
STEPS, MICRO_BATCHES = 5, 3


def make() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG)


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
    expected, model = plain_loop(), make()
    engine = holdfast.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        tmp_path / "run",
        dtype="fp32",
        device="cuda",
        schedule=schedule,
        params_on_host=on_host,
        optimizer_on_host=on_host,
        activations_on_host=on_host,
    )
    with engine:
        for step in range(STEPS):
            engine.step(batches(step))
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name]), name


def test_device_memory_does_not_grow_with_the_number_of_blocks(tmp_path):
    peaks = []
    for blocks in (4, 16):
        config = DecoderConfig(blocks=blocks, width=512, heads=8, kv_heads=4, context=64, dropout=0.0)
        model = Decoder(config)
        torch.cuda.reset_peak_memory_stats()
        with holdfast.offload(
            model, torch.optim.AdamW(model.parameters()), tmp_path / str(blocks), device="cuda"
        ) as engine:
            for step in range(2):
                engine.step(batches(step))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.05 * peaks[0]
