"""A rank that counts the worker threads of its gloo groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, world_size: int, rendezvous: str, say: Callable[..., None]) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups:  # a worker that has done something has its name
        dist.all_reduce(torch.ones(1), group=group)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    say(groups=len(groups), workers=names.count("pt_gloo_runloop"))
