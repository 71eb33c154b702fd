"""A rank that trains on a device: ``ranks.py KIND ROOT STEPS [KILL_AT]``, with RANK, WORLD_SIZE and RENDEZVOUS set.

The group is NCCL's where each rank has a device, and gloo's where two share one. Prints a line of JSON per step, and
kills itself once step KILL_AT is durable.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist

from dist.training import whole_state, whole_tensors, wrapped
from gpu.training import DEVICE
from holdfast.checkpointer import Checkpointer
from holdfast.store.commit.retention import Keep


def main(kind: str, root: str, steps: int, kill_at: int | None) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if DEVICE == "cuda" and world_size == 1 else "gloo"
    torch.use_deterministic_algorithms(True)
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    rendezvous = f"file://{os.environ['RENDEZVOUS']}"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size)
    if kind == "ddp":  # of one rank too
        model = torch.nn.parallel.DistributedDataParallel(wrapped("plain", world_size, device=DEVICE))
    else:
        model = wrapped(kind, world_size, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    if kind == "ddp":  # which forms its buckets anew after the first backward
        model(torch.zeros(5, 7, device=DEVICE)).sum().backward()
        model.zero_grad()
    torch.manual_seed(100 + rank)
    with Checkpointer(
        root, model=model, optimizer=optimizer, base_every=4, keep=Keep(9), wait_each_step=True
    ) as checkpointer:
        for i in range(checkpointer.resume(), steps):
            loss = model(torch.randn(5, 7).to(DEVICE)).pow(2).mean()
            loss.backward()
            loss = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            state = whole_state(model, optimizer)
            print(json.dumps({"step": i + 1, "loss": float(loss), "state": state}), flush=True)
            checkpointer.step()
            if i + 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save()
        found = {name: tensor.detach().cpu() for name, tensor in whole_tensors(model, optimizer).items()}
        if rank == 0:
            torch.save(found, f"{root}.whole")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
