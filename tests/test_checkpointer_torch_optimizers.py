"""Every optimizer of ``torch.optim`` under a Checkpointer has the bits of a plain loop after a kill."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
import torch_optimizers
from combined import CAMPAIGN
from support.live_copy import copy_of_live_run

CONFIGURATIONS = torch_optimizers.configurations()


def begin(configurations, device):
    """A layer for each configuration, and its optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3) for _ in configurations]).to(device)
    optimizers = [
        torch_optimizers.make(*told, [*layer.parameters()])
        for layer, told in zip(model, configurations.values(), strict=True)
    ]
    return model, optimizers


def iterate(model, optimizers, i, device):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i)).to(device)
    sum(layer(x).square().mean() for layer in model).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def held(configurations, model, optimizers):
    """By configuration, weights and state."""
    each = zip(configurations, model, optimizers, strict=True)
    return {
        name: ([p.detach() for p in layer.parameters()], [dict(slots) for slots in optimizer.state.values()])
        for name, layer, optimizer in each
    }


def alike(one, other):
    if isinstance(one, torch.Tensor):
        kinds = [(each.dtype, each.device, each.stride()) for each in (one, other)]
        return kinds[0] == kinds[1] and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


def changed_by_a_kill(folder, configurations, device="cpu"):
    """The configurations that end otherwise than a plain loop, killed between a base in the midst and the records after
    it; all in one run, each for a layer of its own."""
    whole = begin(configurations, device)
    for i in range(8):
        iterate(*whole, i, device)
    root = folder / "run"
    for until in (6, 8):
        model, optimizers = begin(configurations, device)
        with holdfast.Checkpointer(root, model=model, optimizer=optimizers) as ckpt:
            assert ckpt.resume() == (0 if until == 6 else 6)
            for i in range(ckpt.steps_done, until):
                iterate(model, optimizers, i, device)
                ckpt.step()
                if i == 2:
                    ckpt.save()
            ckpt.wait()
            root = copy_of_live_run(root, folder / "killed" / str(until))
    there, found = held(configurations, *whole), held(configurations, model, optimizers)
    return [name for name in configurations if not alike(there[name], found[name])]


@pytest.mark.slow
def test_every_optimizer_of_torch_goes_on_bit_for_bit(tmp_path):
    """With each option in one of torch's ways, and in a campaign in all."""
    assert len(CONFIGURATIONS) >= 137
    tried = CONFIGURATIONS if CAMPAIGN else torch_optimizers.configurations(one_way=True)
    assert len(tried) >= 45 and changed_by_a_kill(tmp_path, tried) == []
