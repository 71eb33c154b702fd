"""What a rank does that trains a tiny GPT-2 with ``Trainer``, with the callback or, without ``root``, without."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data._utils import worker
from transformers import TrainerCallback

from holdfast.integrations.transformers import HoldfastCallback
from survive_run import digest
from trainer_run import Stream, Texts, everything, make

DATA = {"texts": Texts, "masks": lambda: Texts(noise=True), "stream": Stream}


class Kill(TrainerCallback):
    """This process, when ``step`` steps are done and the last is not recorded."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            time.sleep(1.3)  # longer than steps wait to be written
            os.kill(os.getpid(), signal.SIGKILL)


class Notes(TrainerCallback):
    """A long entry of the history at every step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history.append({"step": state.global_step, "note": 3000 * "."})


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str | None = None,
    kill: tuple[int, int] | None = None,
    data: str = "texts",
    notes: bool = False,
    output: str = "",
    **options: Any,
) -> None:
    """``kill`` names a rank and a step."""
    worker.MP_STATUS_CHECK_INTERVAL = 0.05  # how soon a worker notices that its trainer was killed
    if world_size > 1:
        os.environ |= {"LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    callbacks: list[TrainerCallback] = []
    if root is not None:
        callbacks = [HoldfastCallback(root, base_every=3)]
    callbacks += [Notes()] * notes
    if kill is not None:
        callbacks += [Kill(kill[1])] * (rank == kill[0])
    trainer = make(output or f"{root}.output", data=DATA[data](), callbacks=callbacks, **options)
    trainer.train()
    say(
        losses=trainer.losses, digests={name: digest(value) for name, value in everything(trainer).items()},
        steps=trainer.state.global_step, processes=trainer.args.world_size, finished=True,
    )  # fmt: skip
