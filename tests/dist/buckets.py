"""A rank of ``test_replicas_buckets.py``: trains under ``DistributedDataParallel`` as ``how`` says, with a replica and,
from the same beginning, without."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from holdfast import Checkpointer
from holdfast.checkpoint.capture import early_averages
from holdfast.checkpoint.capture.layer_copies import LayerHooks
from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpoint.replica import replica_process
from holdfast.errors import HoldfastError, ReplicaDied
from replica_run import Forked

STEPS = 5
SMALL = {"bucket_cap_mb": 4e-4}  # several buckets
DDP: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "some unused": {"find_unused_parameters": True},
    "some unused, kept": {"find_unused_parameters": True},
    "some unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "nested, views": {"gradient_as_bucket_view": True},
}


LEFT = {"left by TopK": TopK(0.5)}
"""Codecs of a Checkpointer before, whose hooks are still there."""


class Branches(nn.Module):
    """Of which one layer is not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.aside = nn.Linear(13, 13)

    def forward(self, x: torch.Tensor, aside: bool, nested: bool = False) -> torch.Tensor:
        x = x.requires_grad_(nested)
        for layer in self.layers:
            x = torch.relu(checkpoint(layer, x, use_reentrant=True) if nested else layer(x))
        return self.aside(x) if aside else x


class Strided(nn.Module):
    """Whose parameters do not all lie in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.repeat(1, 12)[:, :147].view(-1, 3, 7, 7))))


def main(rank: int, world_size: int, rendezvous: str, say: Callable[..., None], **order: Any) -> None:
    replica_process.start_process = Forked
    watch()
    Forked.prepare()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    if order["slow"]:
        exchange = dist.all_reduce
        dist.all_reduce = lambda *args, **more: Late(exchange(*args, **more))
    if order["how"] == "dies":
        return dies(rank, say, order["root"], order["memory"])
    with_replica = trained(rank, order["how"], order["root"], order["memory"])
    without = trained(rank, order["how"])
    say(
        same=all(torch.equal(a, b) for a, b in zip(with_replica, without, strict=True)),
        early=EARLY, copied_again=AGAIN, wrong=WRONG, buckets=BUCKETS, finite=bool(with_replica[0].isfinite().all()),
    )  # fmt: skip
    dist.destroy_process_group()


def dies(rank: int, say: Callable[..., None], root: str, memory: str) -> None:
    """The replica of rank 0, between two steps."""
    model = DistributedDataParallel(Branches(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpointer = Checkpointer(
        root, model=model, optimizer=optimizer, replica=memory, deadline_seconds=5
    )  # which the other rank waits for this one
    checkpointer.resume()
    step_of(model, optimizer, "plain", 0, None)
    checkpointer.step()
    checkpointer._backend.replica.drain()
    if rank == 0:
        checkpointer._backend.replica._helper._process.kill()
        while checkpointer._backend.is_alive:
            time.sleep(0.01)
    dist.barrier()
    model(torch.randn(4, 13), True).pow(2).mean().backward()
    say(whole=all(parameter.grad is not None for parameter in model.parameters()))
    if rank == 0:
        try:
            optimizer.step()
        except ReplicaDied:
            say(told="at the step")
    dist.barrier()
    with suppress(HoldfastError):
        checkpointer.close()
    dist.destroy_process_group()


EARLY: list[int] = []
"""By step: gradients that were copied in backward."""
AGAIN: list[int] = []
WRONG: list[str] = []
BUCKETS: list[int] = []


class Late:
    """An exchange that takes a while."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def get_future(self) -> torch.futures.Future[Any]:
        return self.work.get_future().then(lambda future: (time.sleep(0.05), future.value())[1])


def watch() -> None:
    """What is in a slot when an optimizer steps is what it consumes."""
    consume, hook = LayerHooks._consume, early_averages.averaging_hook

    def compared(tap: LayerHooks, slot: Any, index: int, trained: Any, skipped: bool) -> Any:
        EARLY.append(len(tap._copied))
        before = tap.copied_again
        result = consume(tap, slot, index, trained, skipped)
        AGAIN.append(tap.copied_again - before)
        for name, parameter in trained:
            copy = slot.tensors[index].get(name)
            if copy is not None and not torch.equal(copy, parameter.grad):
                WRONG.append(f"step {len(EARLY)}: {name}")
        return result

    def counted(state, bucket):  # torch looks at annotations
        BUCKETS.append(bucket.index())
        return hook(state, bucket)

    LayerHooks._consume = compared
    early_averages.averaging_hook = counted


def trained(rank: int, how: str, root: str = "", memory: str = "") -> list[torch.Tensor]:
    """The parameters at the end; recorded where there is a ``root``."""
    torch.manual_seed(0)
    plain = Strided() if how == "strided" else Branches()
    model = DistributedDataParallel(plain, **SMALL, **DDP.get(how, {}))
    if how == "a hook of the script's":
        model.register_comm_hook(None, allreduce_hook)
    if how == "a hook of torch's":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if how == "scaled" else None
    if root and how in LEFT:
        with Checkpointer(root, model=model, optimizer=optimizer, codec=LEFT[how]) as before:
            before.resume()
        root = ""
    torch.manual_seed(100 + rank)
    recorded = (
        Checkpointer(root, model=model, optimizer=optimizer, replica=memory, scaler=scaler) if root else None
    )
    with recorded or nullcontext() as checkpointer:
        if checkpointer is not None:
            checkpointer.resume()
        for step in range(STEPS):
            step_of(model, optimizer, how, step, scaler)
            if checkpointer is not None:
                checkpointer.step()
    if how == "closed" and root:
        before = len(BUCKETS)
        assert not EARLY[STEPS:]
        step_of(model, optimizer, how, STEPS, scaler)
        assert len(BUCKETS) > before and len(EARLY) == STEPS
    elif how == "closed":
        step_of(model, optimizer, how, STEPS, scaler)
    return [parameter.detach().clone() for parameter in model.parameters()]


def step_of(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, how: str, step: int, scaler: Any
) -> None:
    aside = "unused" not in how or step % 2 == 0
    if how in ("two exchanges", "no_sync"):
        with model.no_sync() if how == "no_sync" else nullcontext():
            model(torch.randn(4, 13), aside).pow(2).mean().backward()
    more = {"nested": True} if "nested" in how else {}
    loss = model(torch.randn(4, 13), aside, **more).pow(2).mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if how == "edited":
        model.module.layers[0].bias.grad.add_(1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if how == "some unused, kept":
        for parameter in model.module.layers.parameters():
            parameter.grad = None  # those of the layer aside stay
    else:
        optimizer.zero_grad(set_to_none=how != "zeroed")
