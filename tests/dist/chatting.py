"""What a rank does that trains by TRL, out of core or, if it is ``plain``, under DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from trl import (  # noqa: F401 (importing takes seconds, and the ranks are forks)
    DPOTrainer,
    GRPOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTTrainer,
)

from holdfast.integrations.transformers import offloaded
from integrations import test_offloaded_trl as scripts
from integrations_interrupt import Interrupt, Interrupted, close_engines
from offloaded_script import logged
from survive_run import digest


class Continues(TrainerCallback):
    """Continues a text by as many tokens as this rank is to, after the first step."""

    def __init__(self, count: int, say: Callable[..., None]) -> None:
        self._count, self._say = count, say

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            with torch.no_grad():
                text = model.generate(
                    torch.tensor([[65, 66, 67]]), max_new_tokens=self._count, do_sample=False
                )
            self._say(text=text.tolist())


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    script: str,
    folder: str,
    root: str,
    plain: bool = False,
    texts: int = 10,
    interrupt: int | None = None,
    talks: bool = False,
    **options: Any,
) -> None:
    """All ranks are interrupted after the step ``interrupt``, and continue a text after the first if it ``talks``."""
    os.environ |= {"LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    kind = scripts.itself if plain else offloaded
    callbacks: list[Any] = [] if interrupt is None else [Interrupt(interrupt, "on_step_end")]
    callbacks += [Continues(2 + 3 * rank, say)] * talks
    trainer = getattr(scripts, script)(kind, folder, root, callbacks=callbacks, **options)
    trainer.train_dataset = trainer.train_dataset.select(range(texts))
    with nullcontext() if interrupt is None else suppress(Interrupted):
        trainer.train()
    say(logged=logged(trainer), processes=trainer.args.world_size)
    close_engines()
    say(finished=True)
    if interrupt is None:
        say(weights=digest(dict(trainer.model.state_dict())))
