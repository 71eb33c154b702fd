"""What ranks of FSDP2 or DDP do that train a model of which each step touches little."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpoint.touching import EXPERTS, WORDS, Touching, batch, dense_bytes, touched_bytes
from dist.training import whole_state
from holdfast.checkpointer import Checkpointer


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str,
    kind: str,
    steps: int,
    killed: bool = False,
    experts: int = EXPERTS,
) -> None:
    """Train to ``steps``, each of which is durable before the next; ``killed`` ranks end there without a word."""
    if world_size > 1 or kind == "fsdp":
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    plain = Touching(WORDS, experts)
    model: nn.Module = plain
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
        for expert in plain.experts:
            fully_shard(expert, mesh=mesh)
        fully_shard(plain, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    digests, touched = {}, {}
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer, base_every=1000)
    done = checkpointer.resume()
    digests[done] = whole_state(plain, optimizer)
    for step in range(done + 1, steps + 1):
        model(*batch(plain, step, rank)).backward()
        touched[step] = touched_bytes(plain)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        digests[step] = whole_state(plain, optimizer)
        checkpointer.wait()
    say(resumed=done, digests=digests, touched=touched, dense=dense_bytes(plain))
    if killed:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    say(finished=True)
