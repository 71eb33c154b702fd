"""A model of which each step touches little: few rows of an embedding, some of the experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from holdfast.state.layout.regions import local_of

WORDS, WIDTH, EXPERTS = 5001, 128, 8


class Touching(nn.Module):
    """``experts`` are modules of which two are called; ``stack`` is one tensor, of which all but two get zeros."""

    def __init__(self, words: int = WORDS, experts: int = EXPERTS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.stack = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH)

    def forward(self, tokens: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        for number in chosen:
            hidden = hidden + self.experts[number](hidden) @ self.stack[number]
        return hidden.square().mean()


def batch(
    model: Touching, step: int, rank: int = 0, tokens: int = 256
) -> tuple[torch.Tensor, tuple[int, int]]:
    """The tokens of a rank in ``step``, and the experts of all ranks."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(0, model.embed.num_embeddings, (tokens,), generator=generator)
    return words, (step % len(model.experts), (step + 3) % len(model.experts))


def touched_bytes(model: nn.Module) -> int:
    """The bytes of those rows of this rank's gradients that have a bit that is set."""
    total = 0
    for parameter in model.parameters():
        if parameter.grad is not None and (grad := local_of(parameter.grad)).numel():
            rows = grad.contiguous().view(len(grad) if grad.dim() > 1 else 1, -1).view(torch.uint8)
            total += int(rows.any(1).sum()) * rows.shape[1]
    return total


def dense_bytes(model: nn.Module) -> int:
    return sum(local_of(parameter.detach()).nbytes for parameter in model.parameters())
