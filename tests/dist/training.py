"""What a rank of a world does: a tiny model under DDP or FSDP2, with a checkpointer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast import failpoints
from holdfast.checkpointer import Checkpointer
from holdfast.delta import agreement, helper, host, hosts, orphans, replica
from holdfast.delta.layers import LayerTap
from holdfast.delta.lossy import Int8, TopK
from holdfast.delta.replicas import Replicas
from holdfast.errors import DiskFull
from holdfast.delta.together import Together
from replica_run import Forked, drifting
from survive_run import digest


class Global(torch.optim.Optimizer):
    """Each update depends on the gradients of all parameters, and on a count that is no tensor."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).sum() + 1e-3
        for p in parameters:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p.sub_(p.grad * self.param_groups[0]["lr"] / norm / self.state[p]["count"])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "global": lambda p: Global(p, lr=0.01),
}


class Net(nn.Module):
    """Odd shapes, some smaller than the world, a frozen parameter, buffers."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, width), nn.Linear(width, 3)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(1))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x))))) * self.scale


def wrapped(kind: str, world_size: int, width: int = 13, tiny: bool = False) -> nn.Module:
    """A ``tiny`` one, or one of ``width`` 0, has one parameter and nothing else."""
    torch.manual_seed(0)
    model = nn.Linear(7, 1, bias=False) if tiny or not width else Net(width)
    if kind == "ddp":
        return DistributedDataParallel(model) if world_size > 1 else model
    if kind == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    if kind == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s")))
    return model


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, averages: nn.Module | None = None) -> str:
    """A digest of parameters and optimizer state, whole, the same under any parallelism."""
    found = {}
    for name, parameter in model.named_parameters():
        held = {"param": parameter.detach(), **optimizer.state.get(parameter, {})}
        for slot, value in held.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name.removeprefix('module.')}/{slot}"] = value
    if averages is not None:
        found |= {f"average:{name}": p.detach() for name, p in averages.named_parameters()}
    return digest(dict(sorted(found.items())))


def full(*_: Any, **__: Any) -> None:
    raise DiskFull("no space left")


def main(rank: int, world_size: int, rendezvous: str, say: Callable[..., None], **order: Any) -> None:
    if world_size > 1 or order["kind"] == "fsdp":
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    train(rank, world_size, say, **order)


def train(
    rank: int,
    world_size: int,
    say: Callable[..., None],
    *,
    kind: str,
    root: str,
    steps: int,
    optimizer: str = "adamw",
    resume: dict[str, int] | None = None,
    kill: tuple[int | str, int] | None = None,
    signal_at: tuple[int, int] | None = None,
    failpoint: tuple[int, str] | None = None,
    raises: tuple[int, int] | None = None,
    unit_bytes: int = 100,
    save_at: int | None = None,
    save_every: int | None = None,
    pause: float = 0.0,
    elsewhere: int | None = None,
    average: bool = False,
    resume_of: dict[str, dict[str, int]] | None = None,
    slow_publish: float = 0.0,
    codec: tuple[str, float] | None = None,
    width: int = 13,
    keep_last: int = 2,
    tiny: bool = False,
    unfreeze_at: int | None = None,
    clip: bool = True,
    kill_replica: tuple[int, int] | None = None,
    drift_at: tuple[int, int] | None = None,
    drifting_slot: str | None = None,
    linger_seconds: float = 20.0,
    killed_after: dict[str, int] | None = None,
    deaf_from: int | None = None,
    numb: bool = False,
    killed_in: dict[str, float] | None = None,
    orphans_persist: bool = True,
    disk_fails_orphans: bool = False,
    **options: Any,
) -> None:
    """Train to ``steps``; ``kill`` and its like name a rank, or "all", and a step."""
    from holdfast import checkpointer as module
    from holdfast.delta import bases
    from holdfast.store import journal
    from holdfast.store.retention import Keep

    bases.UNIT_BYTES, module.BASE_BYTES_PER_STEP, journal.GROUPS_PER_SEGMENT = unit_bytes, 1, 3
    root = f"{root}-{rank}" if rank == elsewhere else root
    if codec is not None:
        options["codec"] = {"topk": TopK, "int8": lambda block: Int8(int(block))}[codec[0]](codec[1])
    model = wrapped(kind, world_size, width, tiny)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    resume = (resume_of or {}).get(str(rank), resume)
    plain = getattr(model, "module", model)
    averages = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if average else None
    if averages is not None:
        options |= {"after_update": lambda: averages.update_parameters(plain), "averages": averages}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 20)
    torch.manual_seed(100 + rank)
    losses: list[float] = []
    digests: dict[int, str] = {}
    early: list[bool] = []
    if slow_publish:
        real = Together.publish_shares
        Together.publish_shares = lambda *args: (time.sleep(slow_publish), real(*args))[1]
    if failpoint is not None and failpoint[0] == rank:
        failpoints.armed = failpoint[1]
        failpoints.action = lambda: os.kill(os.getpid(), signal.SIGKILL)
    if str(rank) in (killed_in or {}):
        threading.Timer(killed_in[str(rank)], lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if options.get("replica"):
        helper.start_process, replica.LINGER_SECONDS = Forked, linger_seconds
        if drift_at is not None and drift_at[0] == rank:
            host.apply = partial(drifting, host.apply, drift_at[1], slot=drifting_slot)
        if not orphans_persist:
            hosts.HostAmongOthers._persist = lambda self, notes: None
        if disk_fails_orphans:
            orphans.write_durably = full
        if numb:  # to what the replica says of drift
            hear = Replicas._hear
            Replicas._hear = lambda self, about: None if "drift" in about else hear(self, about)
        accumulated = LayerTap.accumulated

        def counted(tap: LayerTap, name: str, *rest: Any) -> None:
            accumulated(tap, name, *rest)
            early.append(name in tap._copied)

        LayerTap.accumulated = counted
    if kind == "ddp":  # which forms its buckets anew after the first backward, and then adds up in another order
        model(torch.zeros(5, 7)).sum().backward()
        model.zero_grad()
    with Checkpointer(
        root, model=model, optimizer=chosen, scheduler=schedule, keep=Keep(keep_last), **options
    ) as checkpointer:
        done = checkpointer.resume(**(resume or {}))
        say(resumed=done, exactness=checkpointer.exactness)
        digests[done] = whole_state(model, chosen, averages)
        for step in range(done + 1, steps + 1):
            if step == deaf_from:  # to what the others have
                time.sleep(0.1)
                agreement.BUSY_SECONDS = agreement.IDLE_SECONDS = 60.0
                agreement.Agreement.look_soon = lambda self: None
                time.sleep(0.3)
            if step == unfreeze_at:
                plain.first.bias.requires_grad_(True)
            loss = model(torch.randn(5, 7)).pow(2).mean()
            losses.append(float(loss.detach()))
            loss.backward()
            if unfreeze_at is not None and step >= unfreeze_at:  # DDP does not know of it
                dist.all_reduce(plain.first.bias.grad)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            chosen.step()
            schedule.step()
            chosen.zero_grad()
            if kill_replica is not None and (rank, step) == tuple(kill_replica):
                checkpointer._replica._helper._process.kill()
            if kill is not None and kill[0] in (rank, "all") and kill[1] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if signal_at is not None and (rank, step) == tuple(signal_at):
                os.kill(os.getpid(), signal.SIGTERM)
            if raises is not None and (rank, step) == tuple(raises):
                raise ValueError("a mistake of the script")
            digests[step] = whole_state(model, chosen, averages)
            say(digests=digests, losses=losses, at=step)
            checkpointer.step()
            if (killed_after or {}).get(str(rank)) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if average:  # which has been updated now
                digests[step] = whole_state(model, chosen, averages)
            time.sleep(pause)
            say(durable=checkpointer.durable_step, survives=checkpointer.replica_step)
            if step == save_at or (save_every is not None and step % save_every == 0):
                checkpointer.save()
                say(saved=checkpointer.durable_step)
    say(finished=True, durable=checkpointer.durable_step, digests=digests, losses=losses)
    if options.get("replica"):
        say(copied_again=checkpointer._tap.copied_again, early=sum(early))
    if dist.is_initialized():
        dist.destroy_process_group()
