"""What a rank does that trains by a loop of its own with ``Accelerator``, out of core or, if ``plain``, under DDP."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import datasets  # noqa: F401 (accelerate imports it where there are several ranks; it takes seconds)
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from holdfast.integrations.accelerate import offloaded
from holdfast.offload import exit_hook
from offloaded_loop_script import NORM, everything, its_own, of_rows, train
from survive_run import digest


def twice(net: Any, batch: Any) -> torch.Tensor:
    return net(**batch).loss + net(**batch).loss


LOSSES = {"own": its_own, "rows": of_rows, "twice": twice}


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str,
    plain: bool = False,
    act: Sequence[Any] = (),
    spoilt: str = "",
    loss: str = "own",
    **options: Any,
) -> None:
    """``act`` is a rank, and what it does after a step. ``spoilt`` is what differs on rank 1."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    os.environ |= {"LOCAL_RANK": str(rank)}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(7 + rank)
    if rank and spoilt == "another loader":
        options["samples"] = 31
    elif rank and spoilt:
        loss = spoilt

    def after_step(step: int, accelerator: Any) -> None:
        if not act or step != act[2]:
            return
        if act[1] == "save":  # by all ranks
            net = accelerator.unwrap_model(accelerator._models[0])
            net.save_pretrained(f"{root}/pretrained", is_main_process=accelerator.is_main_process)
            accelerator.save_model(net, __file__)  # which accelerate refuses, and goes on
            accelerator.save_model(net, f"{root}/model")
            accelerator.save_state(f"{root}/state")
            say(saved=digest(accelerator.engine.state_dict()), durable=accelerator.engine.durable_step)
        elif act[1] == "join":
            accelerator.join_uneven_inputs(accelerator._models)
        elif rank == act[0]:
            while accelerator.engine.durable_step < step - 1:
                time.sleep(0.01)
            if act[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("of this process alone")

    kind = Accelerator if plain else offloaded(Accelerator, f"{root}/run", clipping=NORM)
    try:
        told = train(kind, loss_of=LOSSES[loss], after_step=after_step, **options)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        for engine in [*exit_hook._open]:
            engine.give_up()  # as the end of a process does
        return
    say(
        losses=told.losses, norms=told.norms, rates=told.rates, evaluated=told.evaluated, finished=True,
        digest=everything(told),
    )  # fmt: skip
    torch.save(told.weights, f"{root}/weights-{rank}.pt")
