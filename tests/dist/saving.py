"""What a rank of a world does that saves and loads with torch.distributed.checkpoint: a small model under any
parallelism, trained for two steps."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast.integrations.dcp import StorageReader, StorageWriter
from holdfast.store.commit.retention import Keep
from survive_run import digest


def net() -> nn.Module:
    """Of rows that no world divides, but where tensor parallelism asks for it; with buffers and a frozen parameter."""
    parts = OrderedDict(
        first=nn.Linear(6, 8), second=nn.Linear(8, 4), norm=nn.BatchNorm1d(4), last=nn.Linear(4, 5),
        frozen=nn.Linear(5, 5)
    )  # fmt: skip
    model = nn.Sequential(parts)
    model.get_parameter("frozen.bias").requires_grad_(False)
    return model


def wrapped(kind: str, world_size: int) -> nn.Module:
    model = net()
    if kind == "ddp":
        return DistributedDataParallel(model) if world_size > 1 else model
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    if kind == "hsdp":
        return fully_shard(
            model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s"))
        )
    if kind == "fsdp2_tp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    return model


def made(
    kind: str, world_size: int, seed: int, steps: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model that was trained for ``steps`` steps on all ranks."""
    torch.manual_seed(seed)
    model = wrapped(kind, world_size)
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "lr": 0.01 * seed}, {"params": others, "weight_decay": 0.0}]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(steps):
        model(torch.randn(5, 6)).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer, schedule


def state_of(parts: tuple[nn.Module, torch.optim.Optimizer, Any], flat: bool) -> dict[str, Any]:
    model, optimizer, schedule = parts
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    beside = {
        "scheduler": schedule.state_dict(),
        "step": schedule.last_epoch,
        "loader": {"consumed": 10, "raw": b"\0x"},
    }
    return {
        "model": of_model,
        "optim": of_optimizer,
        "generator": torch.arange(100, dtype=torch.uint8),
        **beside,
    }


def digest_of(state: dict[str, Any]) -> str:
    """Of the whole state, the same under any parallelism."""
    found = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, list):
            for place, item in enumerate(value):
                visit(f"{name}.{place}", item)
        elif isinstance(value, DTensor):
            found[name] = value.full_tensor()
        elif hasattr(value, "local_shards"):  # a ShardedTensor, which the first rank alone gets whole
            whole = torch.empty(value.size(), dtype=value.dtype)
            value.gather(0, whole if dist.get_rank() == 0 else None)
            dist.broadcast(whole, 0)
            found[name] = whole
        elif isinstance(value, torch.Tensor):
            found[name] = value
        elif "params" not in name:
            found[name] = torch.tensor(list(repr(value).encode()))

    visit("", state)
    return digest(dict(sorted(found.items())))


def main(rank: int, world_size: int, rendezvous: str, say: Callable[..., None], **order: Any) -> None:
    warnings.simplefilter("ignore")
    if world_size > 1 or order["kind"] != "ddp":
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    {"save": save, "load": load}[order.pop("job")](rank, world_size, say, **order)
    say(finished=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def save(
    rank: int,
    world_size: int,
    say: Callable[..., None],
    *,
    kind: str,
    theirs: str | None = None,
    ours: str | None = None,
    shards: str | None = None,
    flat: bool = False,
    background: bool = False,
    steps: tuple[int | None, ...] = (None,),
    unstorable: int | None = None,
    elsewhere: int | None = None,
    kill: int | None = None,
    keep: int = 2,
    caching: bool = False,
) -> None:
    """Into a folder of torch's, or into a run of ours, or both. ``unstorable``, ``elsewhere`` and ``kill`` are of a
    rank: that has something that cannot be stored, saves into another directory, or dies in writing."""
    ours = f"{ours}-{rank}" if rank == elsewhere else ours
    state = state_of(made(kind, world_size, seed=1), flat)
    say(digest=digest_of(state))
    if theirs is not None:
        dcp.save(state, checkpoint_id=theirs)
    if shards is not None:
        dcp.save(state["model"], storage_writer=dcp.HuggingFaceStorageWriter(shards, save_distributed=True))
    if rank == unstorable:
        state["odd"] = lambda: None
    for step in steps if ours is not None else ():
        writer = StorageWriter(step=step, keep=Keep(keep))
        if rank == kill:
            real = writer.write_data
            writer.write_data = lambda *args, real=real: (real(*args), os._exit(9))[0]
        try:
            if background:
                future = dcp.async_save(state, checkpoint_id=ours, storage_writer=writer)
                future.result()
            else:
                planner = dcp.DefaultSavePlanner(enable_plan_caching=True) if caching else None
                dcp.save(state, checkpoint_id=ours, storage_writer=writer, planner=planner)
        except dcp.api.CheckpointException as error:
            say(error=str(error))


def load(
    rank: int,
    world_size: int,
    say: Callable[..., None],
    *,
    kind: str,
    theirs: str | None = None,
    ours: str | None = None,
    flat: bool = False,
    step: int | None = None,
) -> None:
    """Into a model that is another, from torch's folder or from our run; what was loaded goes into model and optimizer
    and is taken from there again."""
    for name, path in (("theirs", theirs), ("ours", ours)):
        if path is None:
            continue
        parts = made(kind, world_size, seed=2, steps=1)
        state = state_of(parts, flat)
        before = digest_of(state)
        state["loader"] = {"consumed": 0, "raw": b""}
        reader = StorageReader(path, step=step) if name == "ours" else dcp.FileSystemReader(path)
        try:
            dcp.load(state, storage_reader=reader)
        except dcp.api.CheckpointException as error:
            untouched = state_of(parts, flat)
            say(error=str(error), untouched=digest_of(untouched) == before)
            continue
        parts[2].load_state_dict(state["scheduler"])
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(*parts[:2], **loaded, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        after = state_of(parts, flat)
        after["loader"], after["generator"] = state["loader"], state["generator"]
        say(**{name: digest_of(after)})
