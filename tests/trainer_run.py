"""A script that trains a tiny GPT-2 with ``Trainer``, as tests run it and as a process that is killed runs it.

    python trainer_run.py OUTPUT RUN [STEP]

says each step that has ended, and at last the losses and the digest of everything. After ``STEP`` it waits to be
killed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.integrations.transformers import HoldfastCallback
from survive_run import digest

VOCABULARY, TOKENS, SAMPLES = 50, 8, 23


class Texts(Dataset):
    """Sample ``i`` is a function of ``i``; with ``noise``, of the global generator as well."""

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i >= SAMPLES:
            raise IndexError(i)
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(i))
        if self.noise:
            tokens[torch.randint(0, TOKENS, ())] = 0
        return {"input_ids": tokens, "labels": tokens}


class Stream(IterableDataset):
    """Of unknown length, and has to be read from the beginning."""

    def __iter__(self):
        return (Texts()[i] for i in range(SAMPLES))


class Losses(list):
    """Of this process alone: the callback keeps plain lists, and leaves this one out."""


class Told(Trainer):
    """Notes the loss of every micro-batch that it trains on, and in its log the mode of the model, as TRL asks it."""

    def log(self, logs: dict[str, Any], *rest: Any, **options: Any) -> None:
        mode = {"training": self.model.training} if "loss" in logs else {}
        super().log({**logs, **mode}, *rest, **options)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        if model.training:
            self.__dict__.setdefault("losses", Losses()).append(loss.item())
        return loss


def make(
    output: str | Path,
    *,
    data: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> Told:
    """The script up to ``train()``; it begins with another model each time but for what the seed makes the same."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=16, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    arguments = {
        "per_device_train_batch_size": 3, "num_train_epochs": 2, "learning_rate": 0.01, "warmup_steps": 2,
        "lr_scheduler_type": "cosine", "logging_steps": 2, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False, "log_level": "error",
    }  # fmt: skip
    return Told(
        model=model,
        args=TrainingArguments(output_dir=str(output), **arguments | options),
        train_dataset=data or Texts(),
        eval_dataset=Texts(),
        callbacks=list(callbacks),
    )


def everything(trainer: Told) -> dict[str, Any]:
    """What the trainer holds, without times."""
    timed = ("runtime", "per_second")
    optimizer = trainer.optimizer.state_dict()
    return {
        "model": trainer.model.state_dict(),
        "slots": {i: dict(sorted(slots.items())) for i, slots in sorted(optimizer["state"].items())},
        "groups": optimizer["param_groups"],
        "schedule": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "flos": trainer.state.total_flos,
        "history": [
            {key: value for key, value in entry.items() if not key.endswith(timed)}
            for entry in trainer.state.log_history
        ],
    }


class Says(TrainerCallback):
    def __init__(self, waits_after: int | None = None) -> None:
        self.waits_after = waits_after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(json.dumps({"step": state.global_step}), flush=True)
        if state.global_step == self.waits_after:
            time.sleep(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = make(
        sys.argv[1], callbacks=[Says(*map(int, sys.argv[3:])), HoldfastCallback(sys.argv[2], base_every=4)]
    )
    trainer.train()
    print(json.dumps({"losses": trainer.losses, "digest": digest(everything(trainer))}), flush=True)
