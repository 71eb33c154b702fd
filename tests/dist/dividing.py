"""What a rank does that begins from a state of another library: which parts it checks, and whether it is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist.training import Mlp, whole_state
from holdfast import sources
from holdfast.checkpointer import Checkpointer
from holdfast.formats import source


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str,
    begin: str,
    machines: list[int],
    stages: bool = False,
) -> None:
    """``machines`` are those that the ranks are on. Of two ``stages`` each has a layer of its own."""
    boot = Path(f"{root}-{rank}.boot")
    boot.write_text(str(machines[rank]))
    sources.BOOT = boot
    looked: list[str] = []
    real = source.ReadFiles.check

    def check(self: source.ReadFiles, part: int) -> None:
        if self.parts[part].has_checksum and part not in self.checked:
            looked.append(f"{Path(self.parts[part].path).name} {self.parts[part].offset}")
        real(self, part)

    source.ReadFiles.check = check
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = Mlp(12)
    if stages:
        delattr(model, ("second", "first")[rank])
    else:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loss = sum(p.sum() for p in model.parameters()) if stages else model(torch.ones(1, 7)).sum()
    loss.backward()
    optimizer.step()
    before = whole_state(model, optimizer)
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer)
    try:
        checkpointer.resume(source=begin)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
    checkpointer.close()
    say(
        finished=True,
        looked=looked,
        same=whole_state(model, optimizer) == before,
        state=whole_state(model, optimizer),
    )
