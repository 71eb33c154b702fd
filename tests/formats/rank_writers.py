"""Writers of the files in which each rank keeps its part, as accelerate, verl and SkyRL call them.

The tensors are torch's own distributed ones, and ``torch.save`` writes them. In one process, torch's fake group plays
one rank after the other: a division needs no communication.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

ACCELERATE = {"model": "pytorch_model_fsdp_0_rank{rank}.bin", "optimizer": "optimizer_0_rank{rank}.bin"}
VERL = {
    "model": "model_world_size_{world}_rank_{rank}.pt", "optimizer": "optim_world_size_{world}_rank_{rank}.pt",
    "extra": "extra_state_world_size_{world}_rank_{rank}.pt",
}  # fmt: skip
Division = Callable[[], tuple[DeviceMesh, tuple[Any, ...]]]


def save_live(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world: int,
    names: dict[str, str],
) -> None:
    """Save what this rank holds as the libraries do: accelerate by names, verl by numbers."""
    if names is VERL:
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra_of(rank)}
    else:
        held = {
            "model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer),
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for kind, name in names.items():
        torch.save(held[kind], folder / name.format(rank=rank, world=world))


def save_by_dcp(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save as accelerate does with DCP: a folder for the model, and one for the optimizer. Called on all ranks."""
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/optimizer_0")


def extra_of(rank: int) -> dict[str, Any]:
    """What verl keeps beside tensors: each rank has random numbers of its own."""
    generator = random.Random(rank)
    return {
        "lr_scheduler": {"last_epoch": 2, "base_lrs": [0.1]},
        "rng": {"cpu": torch.full((8,), rank, dtype=torch.uint8), "random": generator.getstate()},
    }


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be one of ``world`` ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_divided(
    folder: Path, held: dict[str, Any], world: int, division: Division, names: dict[str, str]
) -> Path:
    """Save ``held``, a state by kind, as ``world`` ranks that divide each tensor with axes alike."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with as_rank(rank, world):
            mesh, placements = division()
            state = held | ({"extra": extra_of(rank)} if names is VERL else {})
            for kind, name in names.items():
                if kind in state:
                    divided = _divided(state[kind], mesh, placements) if kind != "extra" else state[kind]
                    torch.save(divided, folder / name.format(rank=rank, world=world))
    return folder


def _divided(value: Any, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _divided(item, mesh, placements) for key, item in value.items()}
    if isinstance(value, list):
        return [_divided(item, mesh, placements) for item in value]
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.is_floating_point():
        return value
    fitting = tuple(
        Shard(0) if isinstance(each, Shard) and each.dim >= value.dim() else each for each in placements
    )
    return distribute_tensor(value.detach(), mesh, fitting, src_data_rank=None)


def fully_sharded(world: int) -> Division:
    return lambda: (init_device_mesh("cpu", (world,)), (Shard(0),))


def by_columns() -> tuple[DeviceMesh, tuple[Any, ...]]:
    return init_device_mesh("cpu", (3,)), (Shard(1),)


def hybrid() -> tuple[DeviceMesh, tuple[Any, ...]]:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")), (Replicate(), Shard(0))


def strided() -> tuple[DeviceMesh, tuple[Any, ...]]:
    """FSDP2 over tensor parallelism."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), (
        _StridedShard(0, split_factor=2),
        Shard(0),
    )


def twice() -> tuple[DeviceMesh, tuple[Any, ...]]:
    return init_device_mesh("cpu", (2, 2)), (Shard(0), Shard(0))


def both_dims() -> tuple[DeviceMesh, tuple[Any, ...]]:
    return init_device_mesh("cpu", (2, 2)), (Shard(1), Shard(0))


def flattened() -> tuple[DeviceMesh, tuple[Any, ...]]:
    """An axis that two of a larger mesh became, which hold one another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return mesh["a", "b"]._flatten("ab"), (Shard(0),)


def replicated() -> tuple[DeviceMesh, tuple[Any, ...]]:
    return init_device_mesh("cpu", (2,)), (Replicate(),)


DIVISIONS: dict[str, tuple[int, Division]] = {
    "one": (1, fully_sharded(1)), "fsdp2": (2, fully_sharded(2)), "fsdp3": (3, fully_sharded(3)),
    "columns": (3, by_columns), "hybrid": (4, hybrid), "strided": (4, strided), "twice": (4, twice),
    "both dims": (4, both_dims), "flattened": (4, flattened), "replicated": (2, replicated),
    "more ranks than rows": (8, fully_sharded(8)),
}  # fmt: skip
"""By name the number of ranks, and the division."""


def whole(value: Any) -> Any:
    """``value`` with each distributed tensor whole. Called on all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value
