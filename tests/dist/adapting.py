"""The same of a decoder of transformers with adapters of PEFT on a frozen base; or ``holdfast train`` in a rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import peft
import torch
import torch.distributed as dist

import holdfast
import tiny_folders
from dist import ways
from dist.ways import Task
from holdfast.cli import main as command_line
from holdfast.cli.train import train_job
from holdfast.offload.engine import Engine

HIDDEN = 4096
"""Of the base, beside which adapters are small."""


def micro_batches(step: int, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, tiny_folders.VOCABULARY, (count, 2, 10), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def task(folder: str | None = None, reference: bool = False) -> Task:
    """Of a base that is in memory, both of whose adapters matter at once; or of one in a ``folder``, on meta."""
    torch.manual_seed(0)
    chosen = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    if folder is not None:
        model, source = holdfast.pretrained(folder, reference=reference)
        return Task(
            peft.get_peft_model(model, peft.LoraConfig(**chosen)).train(), micro_batches, source=source
        )
    model = tiny_folders.llama(intermediate_size=HIDDEN)
    model.config.use_cache = False
    adapted = peft.get_peft_model(model, peft.LoraConfig(**chosen, init_lora_weights=False)).train()
    return Task(adapted, micro_batches)


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    words: Sequence[str] = (),
    kill: Sequence[int] = (),
    **order: Any,
) -> None:
    """What ``ways`` does with tasks of here; or the command of ``words``, in which ``kill`` has a rank and a step."""
    if not words:
        ways.main(rank, world_size, rendezvous, say, tasks=task, **order)
        return
    begin, step = dist.init_process_group, Engine.step

    def killed_step(engine: Engine, *given: Any) -> Any:
        if kill and engine.steps_done == kill[1]:
            engine.wait()  # so that there is something to go on from
            if rank == kill[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return step(engine, *given)

    dist.init_process_group = partial(begin, init_method=rendezvous, rank=rank, world_size=world_size)
    Engine.step, train_job.SAMPLE_TOKENS = killed_step, 1
    sys.argv = ["holdfast", *words]
    try:
        command_line.main()
    except SystemExit as ended:
        say(finished=not ended.code)
