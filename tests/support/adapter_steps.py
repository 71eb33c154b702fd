"""Steps of adapters on a tiny language model: in a plain loop, and the micro-batches for the engine beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import holdfast
from tiny_folders import VOCABULARY

COUNT = 2
"""Micro-batches of a step."""


def of_trained(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Return an optimizer of the parameters that are trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def micro_batches(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (COUNT, 2, 10), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def plain_losses(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train ``model`` in a plain loop, with the engine's random numbers, and return its losses."""
    losses = []
    with holdfast.keyed_rng(model) as keys:
        for step in range(steps):
            losses.append(0.0)
            for m, batch in enumerate(micro_batches(step)):
                keys.at(step, m)
                loss = model(**batch).loss / COUNT
                loss.backward()
                losses[-1] += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return losses
