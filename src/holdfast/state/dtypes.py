"""Types of tensors: torch's own by the names of safetensors, and the reverse."""

from __future__ import annotations

import torch

from .tensor_entries import TORCH_NAMES

FROM_NAME: dict[str, torch.dtype] = {name: getattr(torch, theirs) for name, theirs in TORCH_NAMES.items()}
TO_NAME = {dtype: name for name, dtype in FROM_NAME.items()}
