"""A script that shuffles, augments, drops out and reads ahead with workers, as a process that is killed runs it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast
from survive_run import digest

STEPS, SAMPLES, BATCH = 14, 23, 4
"""56 samples are two epochs and a part of the third."""


class Augmented:
    """Regression on a noisy line; noise and flips are drawn when a sample is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 6) * index / SAMPLES + 0.1 * torch.randn(6) + 0.1 * random.random()
        return (x if np.random.rand() < 0.5 else x.flip(0)), torch.tensor([index / SAMPLES])


def net() -> nn.Module:
    random.seed(7)
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def train(
    root: str,
    steps: int = STEPS,
    *,
    num_workers: int = 0,
    said: Callable[..., None] = lambda **_: None,
    acknowledge: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> None:
    """Resume and train to ``steps``. Says the step resumed from, durable steps, losses, and a digest of the end."""
    from torch.utils.data._utils import worker

    worker.MP_STATUS_CHECK_INTERVAL = 0.05  # how soon a worker notices that its trainer was killed
    model, losses, newest = net(), [], -1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = holdfast.loader(Augmented(), BATCH, num_workers, seed=11)
    with holdfast.Checkpointer(
        root, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, **options
    ) as checkpointer:
        done = checkpointer.resume()
        said(resumed=done)
        for _, (x, y) in zip(range(done, steps), loader):
            loss = nn.functional.mse_loss(model(x), y)
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            checkpointer.step()
            if checkpointer.durable_step > newest:
                newest = checkpointer.durable_step
                acknowledge(newest)
        checkpointer.wait()
        acknowledge(checkpointer.durable_step)
    loader.close()
    state = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), loader.state_dict()]
    said(finished=True, losses=losses, digest=digest([*state, torch.get_rng_state(), random.getstate()]))
