"""Forms: which tensors an optimizer keeps for a parameter of some shape, and what they look like.

The engine lays out a block's file by them before anything is computed, and cuts them with the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..state.atoms import SEED, STEP


@dataclass(frozen=True)
class Form:
    """A tensor of an optimizer's state. Where an update is cut, it has one entry for ``every`` so many elements of
    the parameter, the last entry for the rest; where it is not, the shape is any."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    every: int = 1


@dataclass(frozen=True)
class Slots:
    """What an optimizer keeps for one parameter: tensors, and scalars by their dtype."""

    tensors: Mapping[str, Form]
    scalars: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.tensors, *self.scalars}

    def zeros(self, device: torch.device) -> dict[str, torch.Tensor]:
        """All of it as zeros; scalars in host memory."""
        made = {
            name: torch.zeros(form.shape, dtype=form.dtype, device=device)
            for name, form in self.tensors.items()
        }
        return made | {name: torch.zeros((), dtype=dtype) for name, dtype in self.scalars.items()}


def anew(held: Mapping[str, Any]) -> dict[str, Any]:
    """Of what an optimizer ``held`` for a parameter, what stays when it begins anew: a seed, if there was one."""
    return {STEP: torch.tensor(0.0), SEED: held[SEED]} if SEED in held else {}
