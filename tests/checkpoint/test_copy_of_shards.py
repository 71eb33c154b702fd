"""A copy in memory holds sharded parameters that do not train: torch counts no changes of their parts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import holdfast


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_frozen_shard_that_trained_since_goes_back(alone, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    frozen, states = model[0].weight, []
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(copy_every=4)
        for step in range(5):
            frozen.requires_grad_(step in (0, 1, 4))
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            states.append(frozen.to_local().detach().clone())
        frozen.requires_grad_(False)
        assert not torch.equal(states[3], states[4])
        assert guard.check(math.nan)
        assert checkpointer.steps_done == 4
        assert torch.equal(frozen.to_local(), states[3])
