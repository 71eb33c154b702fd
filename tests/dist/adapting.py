"""The same of a decoder of transformers with adapters of PEFT, whose base is frozen."""

from __future__ import annotations

from functools import partial

import peft
import torch

import holdfast
import tiny_folders
from dist import ways
from dist.ways import Task

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


main = partial(ways.main, tasks=task)
