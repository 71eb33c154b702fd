"""What ranks do that have a part of a model each, or that tie what a run has apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from holdfast.checkpointer import Checkpointer
from survive_run import digest


def main(
    rank: int, world_size: int, rendezvous: str, say: Callable[..., None], root: str, steps: int, kind: str
) -> None:
    """Train to ``steps``.

    ``kind``: "stages", of which the first rank has two with an optimizer each, and the second one with two groups; or
    all of a model on every rank, with a head that is "apart" or "tied" to the embedding.
    """
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    parts = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "abc"})
    if kind == "stages":
        own = [nn.ModuleDict({name: parts[name]}) for name in ("ac", "b")[rank]]
        groups = [[{"params": [*part.parameters()]}] for part in own]
        if rank == 1:
            own[0].register_parameter("more", nn.Parameter(torch.ones(2)))
            groups[0].append({"params": [own[0].more], "lr": 0.2})
    else:
        own = [parts]
        if kind == "tied":
            parts["c"].weight = parts["a"].weight
        groups = [[{"params": parts.parameters()}]]
    optimizers = [torch.optim.AdamW(each, lr=0.1) for each in groups]
    checkpointer = Checkpointer(root, model=own, optimizer=optimizers, base_every=1000)
    say(resumed=checkpointer.resume(), state=digest([part.state_dict() for part in own]))
    while checkpointer.steps_done < steps:
        loss = sum(p.square().sum() for part in own for p in part.parameters())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        checkpointer.step()
    checkpointer.wait()
    dist.barrier()  # the first rank has the store that the other one asks
    checkpointer.close(save=False)
    say(ended=digest([part.state_dict() for part in own]))
