"""A small decoder that has everything awkward, its data and its optimizer.

Vocabulary 37, grouped-query attention, a fused gate and up projection, tied embeddings, a frozen parameter, a scalar
and an empty tensor, two parameter groups, four experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, HEAD, ROWS, LENGTH, BLOCKS, EXPERTS = 37, 4, 12, 6, 4, 4


class Form(NamedTuple):
    """What may differ between two such decoders. With ``trains_odd`` the scalar and the empty tensor are parameters,
    which FSDP2 does not take; else they are buffers."""

    heads: int = 6
    kv_heads: int = 2
    trains_odd: bool = False

    @property
    def width(self) -> int:
        return self.heads * HEAD


class _Copied(torch.autograd.Function):
    """What every rank has, used by each in part: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Summed(torch.autograd.Function):
    """The sum of what every rank has a part of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        width = form.width
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, form.kv_heads * HEAD, bias=False)
        self.v = nn.Linear(width, form.kv_heads * HEAD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        scores = (q @ k.transpose(-1, -2)) / HEAD**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gate and up lie in turn, so that a cut between rows is one between pairs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.gate_up(x).unflatten(-1, (-1, 2))
        return self.down(F.silu(pairs[..., 0]) * pairs[..., 1])


class Experts(nn.Module):
    """Every token goes to all of them, weighted. Held by a mesh, each rank has its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, width, width) / width)
        self.over_ranks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        weight = self.weight
        if not self.over_ranks:
            return torch.einsum("bte,btw,ewv->btv", shares, x, weight)
        local = weight.to_local()
        first = dist.get_rank() * local.shape[0]
        shares, x = _Copied.apply(shares), _Copied.apply(x)
        mine = shares[..., first : first + local.shape[0]]
        return _Summed.apply(torch.einsum("bte,btw,ewv->btv", mine, x, local))


class Block(nn.Module):
    def __init__(self, form: Form, has_experts: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(form.width), Attention(form)
        self.mlp = Experts(form.width) if has_experts else Mlp(form.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Awkward(nn.Module):
    """``blocks`` are those that this rank has, of a pipeline; the first has the embedding, the last the head as well,
    which is tied to it."""

    def __init__(self, form: Form, blocks: Sequence[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, form.width)
        made = {str(n): Block(form, has_experts=n == 2) for n in range(BLOCKS)}
        made["0"].norm.weight.requires_grad_(False)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.head = nn.Linear(form.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        kept = range(BLOCKS) if blocks is None else blocks
        alone = blocks is None  # then they are a list, as out-of-core training takes them
        self.blocks = (
            nn.ModuleList(made.values()) if alone else nn.ModuleDict({str(n): made[str(n)] for n in kept})
        )
        if 0 not in kept and BLOCKS - 1 not in kept:
            del self.embed, self.head
        for name, value in {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}.items():
            if not form.trains_odd:
                self.register_buffer(name, value)
            elif BLOCKS - 1 in kept:
                self.register_parameter(name, nn.Parameter(value))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x) if targets is None else loss_of(self.logits(x), targets)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * self.scalar + self.empty.sum()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of ``step``."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 0.001},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.002},
    ]
    return torch.optim.AdamW(groups, foreach=False)
