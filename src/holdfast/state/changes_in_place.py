"""The count of changes in place of a tensor, and the small attributes of a module.

Called where a change is looked for that no optimizer made: of buffers that are not persistent, of frozen parameters.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..errors import BadInput
from .encoding import encode

SMALL = 16
"""The most elements of a tensor in an attribute of a module that is kept."""


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for a tensor of inference mode, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def small_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes that are numbers or small tensors, as JSON."""
    found, buffers = {}, set(map(id, module._buffers.values()))  # another name of a buffer remains one
    for name, value in vars(module).items():
        is_number = type(value) in (bool, int, float)
        is_small = type(value) is torch.Tensor and value.numel() <= SMALL and id(value) not in buffers
        if name != "training" and (is_number or is_small):
            with suppress(BadInput):  # a tensor of a kind that is not stored
                found[name] = encode(value)
    return found
