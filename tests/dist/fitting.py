"""What a rank does that trains with Lightning, out of core or, if it is ``plain``, under DDP."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from holdfast.integrations.lightning import OffloadedDDPStrategy, OffloadedStrategy
from holdfast.offload import exit_hook
from integrations.test_offloaded_lightning import Module, Notes, ended, fit
from offloaded_loop_script import of_rows


class Scaled(Module):
    """A module whose steps are the longer, the larger their gradients are."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(Module):
    """A module whose loss over several processes is that of their rows together."""

    def training_step(self, batch: Any, number: int) -> Any:
        loss = of_rows(self.net, batch)
        size = len(batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=size, sync_dist=True)
        return {"loss": loss, "number": number}


class At(L.Callback):
    """Kills this process, or fails, after the step ``step``."""

    def __init__(self, what: str, step: int) -> None:
        self._what, self._step = what, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._step:
            return
        while trainer.strategy.engine.durable_step < self._step - 1:
            time.sleep(0.01)
        if self._what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("of this process alone")


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str,
    strategy: str = "",
    rows: bool = False,
    act: Sequence[Any] = (),
    **options: Any,
) -> None:
    """``act`` is a rank, and what it does after a step."""
    warnings.simplefilter("ignore")
    os.environ |= {
        "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(7 + rank)
    kinds = {"": OffloadedDDPStrategy, "one process": OffloadedStrategy}
    chosen: Any = kinds[strategy](f"{root}/run") if strategy in kinds else strategy
    others = [At(*act[1:])] if act and act[0] == rank else []
    try:
        trainer, module, told = fit(
            root,
            Notes(),
            *others,
            strategy=chosen,
            module=Rows() if rows else Scaled(),
            **{"devices": world_size} | options,
        )
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        for engine in [*exit_hook._open]:
            engine.give_up()  # as the end of a process does
        return
    say(told=list(told), ended=ended(trainer, module), processes=trainer.world_size, finished=True)
    torch.save(module.state_dict(), f"{root}/weights-{rank}.pt")
