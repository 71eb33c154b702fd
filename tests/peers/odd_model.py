"""A model with what is awkward to cut: odd sizes, tied embeddings, a buffer, a frozen layer; and its data."""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """Odd sizes, tied embeddings, a buffer, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.up = nn.Linear(10, 13)
        self.frozen = nn.Linear(13, 13)
        self.down = nn.Linear(13, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens):
        self.seen += 1
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(self.frozen(torch.tanh(self.up(hidden))))))


def groups_of(model):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [p for n, p in named if p.ndim == 1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def tokens_of(step):
    """A batch of 12, which ranks divide."""
    return torch.randint(0, 37, (12, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
