"""Forms: the names, shapes and dtypes of the tensors that an optimizer keeps for a parameter of some shape.

The engine uses them to lay out a block's file before anything is computed, and to slice state with its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..state.tensor_entries import SEED, STEP


@dataclass(frozen=True)
class Form:
    """A tensor of an optimizer's state.

    Where updates are sliced, it has one entry for ``every`` so many elements of the parameter, and a last one for the
    rest. Otherwise its shape is free.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    every: int = 1


@dataclass(frozen=True)
class Slots:
    """The state that an optimizer keeps for one parameter: tensors, and scalars by their dtype."""

    tensors: Mapping[str, Form]
    scalars: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.tensors, *self.scalars}

    def zeros(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the whole state as zeros; scalars are in host memory."""
        made = {
            name: torch.zeros(form.shape, dtype=form.dtype, device=device)
            for name, form in self.tensors.items()
        }
        return made | {name: torch.zeros((), dtype=dtype) for name, dtype in self.scalars.items()}


def anew(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that remains of ``held`` when optimizer state begins anew: a seed, if there was one."""
    return {STEP: torch.tensor(0.0), SEED: held[SEED]} if SEED in held else {}
