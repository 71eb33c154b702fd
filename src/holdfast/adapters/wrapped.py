"""Wrapped: what is inside of the objects that libraries put around those of torch."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BadInput

TORCHS_OWN = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Of accelerate's ways to train those that leave the state to torch: one process, or several of DDP."""


def innermost(optimizer: Any) -> Any:
    """The optimizer of torch in wrappers like that of accelerate, which are no place for hooks."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_unless_torchs(accelerator: Any) -> None:
    """Raise ``BadInput`` if the state of what ``accelerator`` trains is laid out by something else than torch."""
    by = accelerator.distributed_type
    if by not in TORCHS_OWN:
        raise BadInput(
            f"accelerate trains by {by.value} here, and its state is not one that this adapter knows: train in one"
            " process, or in several with DistributedDataParallel, which torchrun gives without more settings"
        )
