"""What ranks do that train for two steps, and then iterate without an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.capture import mutation_check
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, RankFailed


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    root: str,
    kind: str,
    iterations: int,
    habit: str,
) -> None:
    """``habit`` is what is done in ``iterations``: nothing, or gradients are summed, with an exchange in each or
    unsynchronised."""
    mutation_check.HINT, mutation_check.PATIENCE = 5, 20
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()

    checkpointer = Checkpointer(root, model=model, optimizer=optimizer)
    checkpointer.resume()
    try:
        step()
        step()
        if habit == "unsynchronised":
            model.set_requires_gradient_sync(False)
        for number in range(iterations):
            if habit != "nothing":
                model(torch.ones(3, 4)).sum().backward()
            dist.barrier()
            checkpointer.step()
            say(idle=number + 1)
        if habit == "unsynchronised":
            model.set_requires_gradient_sync(True)
        step()
        say(steps=checkpointer.steps_done)
    except (BadInput, RankFailed) as error:  # its own refusal, or that of a rank that was ahead
        say(refused=str(error))
        checkpointer.close(save=False)
    else:
        checkpointer.close()
    say(finished=True)
