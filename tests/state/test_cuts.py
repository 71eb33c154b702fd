"""What a process holds of a distributed tensor, where that is no region of it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

import holdfast
from holdfast.errors import ModelNotSupported


@pytest.fixture
def mesh():
    """Of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_sum_that_ranks_have_not_formed_is_refused_with_the_way_out_and_nothing_is_written(mesh, tmp_path):
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Partial()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"weight is a sum that its ranks have not formed yet \(placement Partial\).*Redistribute it first"
    with (
        pytest.raises(ModelNotSupported, match=said),
        holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer,
    ):
        checkpointer.resume()
    assert not (tmp_path / "run").exists()
