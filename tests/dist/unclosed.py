"""A script of several ranks that ends without ``close``: ``-m dist.unclosed RANK RENDEZVOUS ROOT WAY``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import holdfast
from training import adamw, batches, decoder, warm_up


def main(rank: int, rendezvous: str, root: str, way: str) -> None:
    """Train in a function, so that no variable names the engine when the process ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = decoder(blocks=2)
    optimizer = adamw(model)
    engine = holdfast.offload(
        model, optimizer, root, precision="fp32", scheduler=warm_up(optimizer), deadline_seconds=20.0
    )
    for step in range(engine.steps_done, 4):
        if (way, rank, step) == ("one raises", 1, 3):
            raise ValueError("an error of the script")
        engine.step(batches(step, 2)[rank : rank + 1])
    if way == "destroyed":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
