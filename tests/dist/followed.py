"""What ranks do that train a run, each beside a standby of its own that waits for the run and follows it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist.training import OPTIMIZERS, whole_state, wrapped
from holdfast.checkpoint.recovery import following
from holdfast.checkpointer import Checkpointer
from holdfast.supervised.attempt import Supervisor
from holdfast.supervised.standing_by import VARIABLE


class Job:
    """A model under a ``Checkpointer``. Constructed in one order on all ranks, since that is a collective."""

    def __init__(self, kind: str, world_size: int, root: str, optimizer: str) -> None:
        self.model = wrapped(kind, world_size)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.ckpt: Any = Checkpointer(root, model=self.model, optimizer=self.optimizer, base_every=1000)

    def train_to(self, step: int) -> None:
        while self.ckpt.steps_done < step:
            self.model(torch.randn(5, 7)).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ckpt.step()
        self.ckpt.wait()

    def state(self) -> Any:
        buffers = [buffer.tolist() for buffer in self.model.buffers()]
        return whole_state(self.model, self.optimizer), buffers

    def follows_to(self, step: int) -> None:
        """Wait until this rank's part of the state is that of ``step``."""
        end = time.monotonic() + 20
        while self.reached < step:
            assert time.monotonic() < end, self.reached
            time.sleep(0.005)

    @property
    def reached(self) -> int:
        follower = self.ckpt._backend._follower
        found = follower and follower.reached
        return found.step if found else -1


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    kind: str,
    root: str,
    optimizer: str = "adamw",
    stops: int | None = None,
) -> None:
    """Train 5 steps, and have the standby take over. The follower of the rank ``stops`` stops at the second."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    following.LOOK_SECONDS = 0.01
    torch.manual_seed(rank)
    with tempfile.TemporaryDirectory() as folder, Supervisor(Path(folder)):
        os.environ[VARIABLE] = f"{folder}/process-1.jsonl"
        job, standby = (Job(kind, world_size, root, optimizer) for _ in range(2))
        job.ckpt.resume()
        job.train_to(3)
        thread = threading.Thread(target=standby.ckpt.resume)
        thread.start()
        if optimizer == "adamw":
            standby.follows_to(2)
            if rank == stops:
                following.Follower._look = lambda self: None  # type: ignore[method-assign]
            job.train_to(5)
            standby.follows_to(2 if rank == stops else 4)
        dist.barrier()
        state = job.state()
        job.ckpt.close()
        thread.join()
        say(same=standby.state() == state, how=standby.ckpt._backend.recovered_by)
        standby.ckpt._thread = threading.get_ident()
        standby.ckpt.close()
    say(finished=True)
