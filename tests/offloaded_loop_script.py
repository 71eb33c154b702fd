"""A script that trains a tiny Llama by a loop of its own with ``Accelerator``, as tests run it and kill it.

    python offloaded_loop_script.py RUN [STEP]

says each step that has ended, and at last the digest of everything. After ``STEP`` it waits to be killed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from holdfast.integrations.accelerate import offloaded
from offloaded_script import Texts, model
from survive_run import digest

NORM = 0.5


@dataclass
class Ended:
    """What a script was told while it trained, and what it has at its end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rest: Any = None


def its_own(net: Any, batch: Any) -> torch.Tensor:
    return net(**batch).loss


def of_logits(net: Any, batch: Any) -> torch.Tensor:
    labels = batch.pop("labels")
    logits = net(batch["input_ids"]).logits
    noise = 1 + 0.01 * torch.rand(())  # drawn between the model and the loss
    return (
        cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + noise * logits.square().mean()
    )


def of_rows(net: Any, batch: Any) -> torch.Tensor:
    """A loss whose mean over processes is that of their rows together, whatever their labels."""
    logits = net(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / len(batch["labels"])


def train(
    kind: type[Accelerator],
    *,
    loss_of: Callable[[Any, Any], torch.Tensor] = its_own,
    samples: int = 22,
    batch_size: int = 2,
    shuffle: bool = True,
    noise: bool = False,
    workers: int = 0,
    accumulation: int = 3,
    clips: bool = True,
    evaluates: bool = False,
    by_pass: bool = False,
    precision: str = "no",
    data: Mapping[str, Any] = MappingProxyType({}),
    after_step: Callable[[int, Any], object] = lambda step, accelerator: None,
    passes: int = 2,
) -> Ended:
    """The script: 4 steps a pass, the last of them of two micro-batches. ``data`` are accelerate's options of it."""
    accelerator = kind(
        cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(**data),
    )  # fmt: skip
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedules = torch.optim.lr_scheduler
    schedule = schedules.StepLR(optimizer, 1, 0.5) if by_pass else schedules.CosineAnnealingLR(optimizer, 8)
    texts = Texts(samples, noise=noise)
    loader = DataLoader(texts, batch_size=batch_size, shuffle=shuffle, num_workers=workers)
    others = DataLoader(Texts(7, 100), batch_size=2)
    net, optimizer, loader, others, schedule = accelerator.prepare(net, optimizer, loader, others, schedule)
    told, step = Ended(), getattr(accelerator, "steps_done", 0)
    for _ in range(passes):
        net.train()
        for batch in loader:
            with accelerator.accumulate(net):
                loss = loss_of(net, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clips:
                    told.norms.append(float(accelerator.clip_grad_norm_(net.parameters(), NORM)))
                optimizer.step()
                if not by_pass:
                    schedule.step()
                optimizer.zero_grad()
            told.losses.append(loss.item())
            told.rates.append(schedule.get_last_lr()[0])
            if accelerator.sync_gradients:
                step += 1
                after_step(step, accelerator)
        if by_pass:
            schedule.step()
        if evaluates:
            net.eval()
            with torch.no_grad():
                found = [accelerator.gather_for_metrics(net(**batch).logits) for batch in others]
            logits = torch.cat(found)
            told.evaluated += [len(logits), float(logits.square().mean())]
    told.weights = dict(accelerator.get_state_dict(net))
    accelerator.end_training()
    told.rest = [
        net.state_dict(),
        schedule.state_dict(),
        optimizer.param_groups[0]["lr"],
        torch.get_rng_state(),
    ]
    return told


def everything(told: Ended) -> str:
    return digest([told.weights, told.rest])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(7)
    waits_after = [int(step) for step in sys.argv[2:]]

    def say(step: int, _: Any) -> None:
        print(json.dumps({"step": step}), flush=True)
        if step in waits_after:
            time.sleep(60)

    told = train(offloaded(Accelerator, sys.argv[1], clipping=NORM), noise=True, after_step=say)
    print(json.dumps({"digest": everything(told)}), flush=True)
