"""What a rank does that trains with torchao's optimizers of few bits, one for each of three layers, under FSDP2.

torchao compiles its update, which takes a compiler and half a minute. Here it is computed without.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from holdfast.checkpointer import Checkpointer
from holdfast.errors import RunMismatch
from survive_run import digest

torch.compile = lambda function, **_: function
KINDS = (AdamW8bit, AdamW4bit, AdamWFp8)
INPUTS = 64


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str,
    steps: int,
    rows: int = 128,
    kill: tuple[int, int] = (0, 0),
    save: bool = False,
    source: str | None = None,
    folder: str | None = None,
) -> None:
    """Train to ``steps``, and say the digests of each. ``kill`` is a rank and the step before whose end it dies.

    ``folder`` gets what torch saves of several ranks.

    Of each matrix, ``rows`` of 64 elements, two ranks have 16 blocks of 256 elements each, if not given otherwise.
    """
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(INPUTS, rows) for _ in KINDS)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
    optimizers = [kind(layer.parameters(), lr=0.01) for kind, layer in zip(KINDS, model, strict=True)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.8)
    torch.manual_seed(rank)
    said: dict[int, str] = {}
    with Checkpointer(root, model=model, optimizer=optimizers, scheduler=schedule, base_every=3) as ckpt:
        before = state_of(model, optimizers)
        try:
            done = ckpt.resume(**({} if source is None else {"source": source}))
        except RunMismatch:
            say(untouched=state_of(model, optimizers) == before)
            raise
        said[done] = state_of(model, optimizers)
        say(resumed=done, digests=said)
        for step in range(done + 1, steps + 1):
            x = torch.randn(5, INPUTS)
            sum(layer(x).square().mean() for layer in model).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            said[step] = state_of(model, optimizers)
            say(digests=said, rate=float(optimizers[0].param_groups[0]["lr"]))
            if list(kill) == [rank, step]:
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.step()
            if step == kill[1] - 1:
                ckpt.wait()
        if save:
            ckpt.save()
        if folder is not None:
            parts, states = get_state_dict(model, optimizers)
            dcp.save({"model": parts, "optim": states, "step": steps}, checkpoint_id=folder)
    say(finished=True, kinds=sorted(kinds_of(optimizers)))
    dist.destroy_process_group()


def kinds_of(optimizers: Sequence[torch.optim.Optimizer]) -> set[str]:
    """The classes of local tensors that the optimizers have."""
    held = [v for optimizer in optimizers for slots in optimizer.state.values() for v in slots.values()]
    return {type(getattr(value, "_local_tensor", value)).__name__ for value in held}


def state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """A digest of parameters and optimizer state, whole: the rows of all ranks in order, packed or not."""
    mine: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        slots: dict[str, Any] = {"param": parameter.detach()}
        for optimizer in optimizers:
            slots |= optimizer.state.get(parameter, {})
        for slot, value in slots.items():
            local = value._local_tensor if isinstance(value, DTensor) else value
            parts = local.__tensor_flatten__()[0] if hasattr(local, "codes") else []
            for part in parts or [""]:
                held = (getattr(local, part) if part else local).detach()
                is_divided = isinstance(value, DTensor) and part != "qmap"
                mine[f"{name}/{slot}.{part}"] = [is_divided, held.flatten().contiguous().view(torch.uint8)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {
        key: torch.cat([each[key][1] for each in everyone]) if is_divided else held
        for key, (is_divided, held) in sorted(mine.items())
    }
    return digest(whole)
