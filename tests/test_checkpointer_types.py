"""Tensors of the types that few models have are recorded, stored and brought back as all others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from checkpoint.loops import same
from holdfast.errors import ModelNotSupported
from training import batches, decoder, stored


class Waves(nn.Module):
    """A complex parameter, and buffers of every type that changes in training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("turned", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("scale", torch.ones(7).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.ones(2).to(torch.float8_e5m2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned.mul_(1j)
        self.scale.copy_((self.scale.float() * 1.5).to(self.scale.dtype))
        return ((x @ self.phase).abs() * self.weight).pow(2).mean()


def begin(root, seed=0, **options):
    torch.manual_seed(seed)
    model = Waves()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, optimizer, holdfast.Checkpointer(root, model=model, optimizer=optimizer, **options)


def train(model, optimizer, step, start, stop):
    for i in range(start, stop):
        x = torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(i))
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        step()


def held(model, optimizer):
    return {
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "slots": [dict(optimizer.state[p]) for p in model.parameters()],
    }


def test_complex_parameters_and_short_floats_are_recorded_and_come_back(tmp_path):
    """By replay, and from a base that another run begins from."""
    model, optimizer, checkpointer = begin(tmp_path / "run")
    with checkpointer:
        checkpointer.resume()
        train(model, optimizer, checkpointer.step, 0, 4)
    there = held(model, optimizer)
    for root, source in (("other", f"{tmp_path / 'run'}@4"), ("run", None)):
        again = begin(tmp_path / root, seed=5)
        with again[2] as checkpointer:
            assert checkpointer.resume(source=source) == 4
            assert same(held(*again[:2]), there)
            train(*again[:2], checkpointer.step, 4, 6)
            checkpointer.save()
    train(model, optimizer, lambda: None, 4, 6)
    assert same(held(*again[:2]), held(model, optimizer))
    begun = begin(tmp_path / "third", seed=6)  # not by replay
    with begun[2] as checkpointer:
        assert checkpointer.resume(source=holdfast.From(tmp_path / "other", cast=True)) == 6
        assert same(held(*begun[:2]), held(model, optimizer))


@pytest.mark.parametrize("codec", [holdfast.TopK(0.1), holdfast.Int8()])
def test_lossy_codecs_are_for_real_numbers(tmp_path, codec):
    with pytest.raises(ModelNotSupported, match=r"phase is torch\.complex64"):
        begin(tmp_path / "run", codec=codec)
    assert not (tmp_path / "run").exists()


def test_buffers_of_any_type_are_in_the_commits_of_the_engine(tmp_path):
    def opened(value):
        model = decoder(blocks=2)
        model.register_buffer("turned", torch.full((3,), value, dtype=torch.complex64))
        model.register_buffer("short", torch.tensor([value.imag]).to(torch.float8_e5m2))
        return model, holdfast.offload(
            model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32"
        )  # fmt: skip

    model, engine = opened(1 + 2j)
    with engine:
        engine.step(batches(0, 1))
    assert torch.equal(stored(tmp_path)["turned/buffer"], torch.full((3,), 1 + 2j))
    model, engine = opened(0j)
    with engine:
        assert torch.equal(model.turned, torch.full((3,), 1 + 2j)) and model.short.float().item() == 2
