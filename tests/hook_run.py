"""Ranks of DistributedDataParallel that exchange gradients by the hook, over gloo: a process that forks them.

    python hook_run.py FOLDER WORLD_SIZE [scaled]

Each rank leaves ``FOLDER/RANK.pt``: for each step its own gradients, those that the hook left, and its residuals.
With ``scaled`` they are scaled on the way, and in one step the last rank's are infinite.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from holdfast.checkpoint.compression.comm_hook import HookState, topk_hook
from holdfast.checkpoint.compression.lossy import TopK

CODEC = TopK(0.05)
STEPS = 6
INFINITE = 4


class Net(nn.Module):
    """Several blocks, odd sizes, two dtypes, and a layer that is used in some steps and by some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(40, 64), nn.Linear(64, 7), nn.Linear(64, 3)
        self.scale = nn.Parameter(torch.ones(9, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        out = self.second(hidden).pow(2).mean() * self.scale.sum()
        return out + self.spare(hidden).pow(2).mean() if spare else out


def uses_spare(step: int, rank: int) -> bool:
    return step % 3 == 0 or (step % 3 == 1 and rank == 0)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def work(folder: Path, rank: int, world_size: int, scaled: bool) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    plain = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
    state = HookState(CODEC, scaler=scaler if scaled else None)
    model = nn.parallel.DistributedDataParallel(
        copy.deepcopy(plain), bucket_cap_mb=0.001, find_unused_parameters=True
    )
    model.register_comm_hook(state, topk_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        plain.load_state_dict(model.module.state_dict())
        plain.zero_grad()
        plain(batch(step, rank), uses_spare(step, rank)).backward()
        optimizer.zero_grad()
        infinite = scaled and step == INFINITE and rank == world_size - 1
        loss = model(batch(step, rank), uses_spare(step, rank)) * (float("inf") if infinite else 1.0)
        scaler.scale(loss).backward()
        if scaled:
            scaler.unscale_(optimizer)
        given = {n: None if p.grad is None else p.grad.clone() for n, p in model.module.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        state.restore_skipped()
        seen.append(
            {
                "own": {n: None if p.grad is None else p.grad.clone() for n, p in plain.named_parameters()},
                "given": given,
                "residuals": {
                    n: state.residuals[p].clone()
                    for n, p in model.module.named_parameters()
                    if p in state.residuals
                },
            }
        )
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


def main(folder: str, world_size: int, scaled: bool) -> int:
    torch.set_num_threads(1)
    children = []
    for rank in range(world_size):
        child = os.fork()
        if not child:
            code = 1
            try:
                work(Path(folder), rank, world_size, scaled)
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
            os._exit(code)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children) and 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), "scaled" in sys.argv[3:]))
