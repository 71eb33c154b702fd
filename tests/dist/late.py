"""What ranks do of which one comes late to make its checkpointer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from holdfast import distributed
from holdfast.checkpointer import Checkpointer


def main(
    rank: int, world_size: int, rendezvous: str, say: Callable[..., None], root: str, late_seconds: float
) -> None:
    distributed.PATIENCE_SECONDS = 0.5 if late_seconds else 30.0
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    time.sleep(late_seconds * rank)
    checkpointer = Checkpointer(root, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointer.resume()
    checkpointer.close()
    say(finished=True)
