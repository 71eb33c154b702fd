"""The checkpointer with tensors that are no plain arrays of elements: bit for bit, or refused before anything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput


class Keeping(torch.optim.SGD):
    """Keeps what ``made`` gives of each parameter, and a sum of gradients in a view of odd strides."""

    def __init__(self, parameters, made=lambda p: p.detach()[..., :1].clone()):
        super().__init__(parameters, 0.1)
        self.made = made

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            slots = self.state[p]
            if not slots:
                slots["kept"], slots["sampled"] = self.made(p), torch.zeros_like(p.flatten()[::11])
            slots["sampled"] += p.grad.flatten()[::11]
            p.sub_(p.grad + slots["sampled"].sum(), alpha=0.01)


class Buffered(nn.Linear):
    """Changes buffers of odd forms in every forward pass."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(6, 3)
        self.register_buffer("one", torch.ones(4)[1::4])
        self.register_buffer("conjugate", torch.full((3,), 1 + 2j, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch._neg_view(torch.ones(3)))
        self.register_buffer("columns", torch.ones(3, 4)[:, ::2])

    def forward(self, x):
        for buffer in self.buffers():
            buffer += 0.5 if not buffer.is_complex() else 0.5j
        return super().forward(x) * (
            self.one + self.negative.sum() + self.columns.sum() + self.conjugate.imag.sum()
        )


def iterate(model, optimizer, i):
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(i))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model, optimizer):
    held = [slots[name] for slots in optimizer.state.values() for name in sorted(slots)]
    return [tensor.detach().resolve_conj().clone() for tensor in (*model.state_dict().values(), *held)]


@pytest.mark.parametrize("save", [False, True])
def test_views_come_back_bit_for_bit(tmp_path, save):
    plain = Buffered()
    reference = Keeping(plain.parameters())
    for i in range(5):
        iterate(plain, reference, i)
    model = Buffered()
    optimizer = Keeping(model.parameters())
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        for i in range(5):
            iterate(model, optimizer, i)
            ckpt.step()
            if save and i == 3:
                ckpt.save()
    model = Buffered()
    optimizer = Keeping(model.parameters())
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.resume() == 5
    assert all(map(torch.equal, values(model, optimizer), values(plain, reference)))


@pytest.mark.parametrize(
    "made",
    [lambda p: p.detach().to_sparse(), lambda p: [p.detach().to_sparse()], lambda p: p.detach().to("meta")],
)
def test_odd_optimizer_state_is_refused_at_once(tmp_path, made):
    model = nn.Linear(6, 3)
    optimizer = Keeping(model.parameters(), made)
    ckpt = holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    ckpt.resume()
    iterate(model, optimizer, 0)
    with pytest.raises(BadInput, match=r"weight.*kept"):
        ckpt.step()
    ckpt.close(save=False)
    with pytest.raises(BadInput, match=r"weight.*kept"):
        holdfast.Checkpointer(tmp_path / "other", model=model, optimizer=optimizer)
    assert not (tmp_path / "other").exists()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_odd_buffers_that_nobody_asked_for_pass(tmp_path):
    model = nn.Linear(6, 3)
    model.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2)]), persistent=False)
    model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    held = torch.ones(1).expand(3)  # one of all parameters
    optimizer = Keeping(model.parameters(), lambda p: held)
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        iterate(model, optimizer, 0)
        ckpt.step()
        ckpt.save()
    other = nn.Linear(6, 3)
    again = Keeping(other.parameters())
    with holdfast.Checkpointer(tmp_path, model=other, optimizer=again) as ckpt:
        assert ckpt.resume() == 1
    assert all(map(torch.equal, values(other, again), values(model, optimizer)))
    assert again.state[other.weight]["kept"] is again.state[other.bias]["kept"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_are_refused_before_training(tmp_path, kind):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=kind is torch.optim.SGD))
    with pytest.raises(BadInput, match="sparse=False"):
        holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=kind(model.parameters(), 0.1))
    assert not (tmp_path / "run").exists()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer).close(save=False)
