"""Access to torch's objects inside the wrappers of other libraries."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import BadInput

TORCHS_OWN = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Ways of accelerate to train that leave the state to torch: one process, or several of DDP."""


def innermost(optimizer: Any) -> Any:
    """Return torch's optimizer inside wrappers like accelerate's, which do not support hooks."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_unless_torchs(accelerator: Any) -> None:
    """Raise ``BadInput`` if something other than torch lays out the state of what ``accelerator`` trains."""
    by = accelerator.distributed_type
    if by not in TORCHS_OWN:
        raise BadInput(
            f"accelerate trains by {by.value} here, and its state is not one that this adapter knows: train in one"
            " process, or in several with DistributedDataParallel, which torchrun gives without more settings"
        )
