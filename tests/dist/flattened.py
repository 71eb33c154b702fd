"""FSDP1 as ranks of a test have it: how a model is wrapped, clipped, and seen whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

STRATEGIES = {
    "grad": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    """Each layer of its own and what is left, or all in one, as the words after "fsdp1" say."""
    words = set(kind.split()[1:])
    options: dict[str, Any] = {"use_orig_params": "flat" not in words, "device_id": torch.device("cpu")}
    if "flat" in words:
        model.requires_grad_(True)
    for word in words & STRATEGIES.keys():
        options["sharding_strategy"] = STRATEGIES[word]
    if "hybrid" in words:
        sizes = 2, dist.get_world_size() // 2
        options["device_mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s"))
    if "bf16" in words:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    if "buffers" in words:
        options["mixed_precision"] = MixedPrecision(buffer_dtype=torch.bfloat16)
    if "lowgrads" in words:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    if "offload" in words:
        options["cpu_offload"] = CPUOffload(offload_params=True)
    if "strided" in words:
        model.first.weight.data = model.first.weight.data.t().contiguous().t()
    if "layers" in words:
        for name in ("first", "second"):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
    whole = FullyShardedDataParallel(model, **options)
    return whole.module if "inside" in words else whole


def is_wrapped(model: nn.Module) -> bool:
    return isinstance(model, FullyShardedDataParallel)


def clip(model: nn.Module) -> None:
    """As each kind of parallelism does it."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(0.5)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, what each rank holds put together by where FSDP1 says that it begins."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, _held(model, optimizer))
    found: dict[str, torch.Tensor] = {}
    for rank in every:
        for key, (shape, start, value) in rank.items():
            if value.dim() == 0:
                found[key] = value
            else:
                whole = found.setdefault(key, torch.full(shape, torch.nan, dtype=value.dtype))
                whole.view(-1)[start : start + value.numel()] = value.reshape(-1)
    assert not any(value.isnan().any() for value in found.values())
    return dict(sorted(found.items()))


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Any, int, torch.Tensor]]:
    """What this rank holds: by key the shape of the whole, where it begins in that, and its values."""
    names = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in model.named_parameters()}
    mine = {}
    wrappers = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    for handle in (wrapper._handle for wrapper in wrappers if wrapper._handle is not None):
        flat = handle.flat_param
        for p, part, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            held = {"param": p.detach(), **optimizer.state.get(p, {})} if part.in_shard else {}
            start = part.intra_param_start_idx if handle.uses_sharded_strategy else 0
            mine |= {f"{names[id(p)]}/{slot}": (shape, start, v.clone()) for slot, v in held.items()}
    return mine
