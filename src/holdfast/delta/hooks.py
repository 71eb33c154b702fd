"""Hooks: which codec records what ranks exchange, where a communication hook changes that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ranks import Ranks
from .codecs import Codec
from .comm_hook import HookState, hooked
from .lossy import Sparse, TopK
from .powersgd import LowRank, PowerSGD, PowerState, approximated

Hook = HookState | PowerState


def with_hook(
    codec: Codec,
    ranks: Ranks,
    model: nn.Module,
    scaler: Any,
    residuals: dict[torch.Tensor, torch.Tensor],
    subspaces: dict[torch.Tensor, torch.Tensor],
) -> tuple[Codec, Hook | None]:
    """The codec of records under ``codec``, and the hook that is on ``model`` from here on, which keeps ``residuals``
    and ``subspaces``; None where ranks exchange what they do without one. Called on all ranks."""
    if isinstance(codec, PowerSGD):
        power = approximated(ranks, model, codec, scaler, residuals, subspaces)
        return LowRank(power), power
    hook = hooked(model, codec, scaler, residuals) if isinstance(codec, TopK) and not ranks.alone else None
    if hook is not None and isinstance(codec, TopK):
        return Sparse(codec, ranks.world_size), hook
    return codec, None
