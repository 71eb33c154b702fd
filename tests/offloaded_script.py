"""A script that trains a tiny Llama with ``Trainer``, in memory or out of core, as tests run it and kill it.

    python offloaded_script.py OUTPUT [STEP]

says each step that has ended, and at last the digest of everything. After ``STEP`` it waits to be killed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from holdfast.integrations.transformers import offloaded
from survive_run import digest
from trainer_run import Says

VOCABULARY, SAMPLES = 50, 22


class Texts(Dataset):
    """Sample ``i`` is a function of ``i``, with ``noise`` of the global generator too. Some labels do not count."""

    def __init__(self, samples: int = SAMPLES, first: int = 0, noise: bool = False) -> None:
        self.samples, self.first, self.noise = samples, first, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i >= self.samples:
            raise IndexError(i)
        generator = torch.Generator().manual_seed(self.first + i)
        tokens = torch.randint(0, VOCABULARY, (10,), generator=generator)
        if self.noise:
            tokens[torch.randint(0, 10, ())] = 0
        labels = tokens.clone()
        labels[: int(torch.randint(0, 8, (), generator=generator))] = -100
        return {"input_ids": tokens, "labels": labels}


SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def model(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options))


def arguments(output: object, **options: Any) -> dict[str, Any]:
    usual = {
        "output_dir": str(output), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
        "num_train_epochs": 2, "learning_rate": 0.01, "warmup_steps": 2, "lr_scheduler_type": "cosine",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False, "log_level": "error",
    }  # fmt: skip
    return usual | options


def make(kind: type[Trainer], output: object, *, callbacks: Any = (), **options: Any) -> Any:
    """The script up to ``train()``: 4 steps an epoch, the last of them of two micro-batches."""
    given = {"train_dataset": Texts()} | {
        name: options.pop(name) for name in ("model", "compute_metrics", "train_dataset") if name in options
    }
    return kind(
        args=TrainingArguments(**arguments(output, **options)),
        eval_dataset=Texts(7, 100),
        callbacks=list(callbacks),
        **{"model": given.pop("model", None) or model(), **given},
    )


def logged(trainer: Any) -> list[dict[str, Any]]:
    """What was logged, without times."""
    timed = ("runtime", "per_second", "preparation_time", "step_time")
    return [
        {key: value for key, value in entry.items() if not key.endswith(timed)}
        for entry in trainer.state.log_history
    ]


def everything(trainer: Any) -> dict[str, Any]:
    """What an offloaded trainer holds, without times; its engine is closed."""
    if trainer.engine is not None:
        trainer.engine.close()
    return {
        "model": trainer.model.state_dict(),
        "groups": [
            {k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups
        ],
        "schedule": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "flos": trainer.state.total_flos,
        "logged": logged(trainer),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    says = Says(*map(int, sys.argv[2:]))
    trainer = make(offloaded(Trainer), sys.argv[1], callbacks=[says], eval_strategy="steps", eval_steps=3)
    trainer.train()
    print(json.dumps({"digest": digest(everything(trainer))}), flush=True)
