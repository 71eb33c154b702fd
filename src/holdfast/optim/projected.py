"""Common base of APOLLO and Grass: moments of a matrix in few rows, projected anew every ``update_gap`` steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ..state.tensor_entries import STEP
from .adamw import check_adam
from .declared_state import ShapedStateOptimizer


class ProjectedOptimizer(ShapedStateOptimizer):
    """An optimizer whose groups have ``rank``, ``scale``, ``update_gap`` and ``seed``.

    AdamW updates parameters that are no matrices, and groups with ``rank=None``.
    """

    cut = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_adam(defaults["lr"], defaults["betas"], defaults["eps"], defaults["weight_decay"])
        rank, gap, scale = (defaults[name] for name in ("rank", "update_gap", "scale"))
        if (rank is not None and rank < 1) or gap < 1 or scale <= 0:
            raise ValueError(f"rank = {rank}, update_gap = {gap} and scale = {scale} must be positive")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and give each matrix that needs one its own seed, derived from the group's and its position."""
        place = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        for number, param in enumerate(param_group["params"], place):
            if "seed" in self.forms(param_group, tuple(param.shape)).scalars:
                seed = torch.tensor(drawn(param_group["seed"], number))
                self.state[param] = {STEP: torch.tensor(0.0), "seed": seed}


def is_projected(group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    """Return whether a parameter of ``shape`` has moments in few rows; otherwise AdamW updates it."""
    return len(shape) == 2 and group["rank"] is not None


def rows_of(group: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    """Return the number of rows of a matrix's moments: ``rank``, but no more than the matrix has."""
    return min(group["rank"], *shape)


def drawn(seed: int, number: int) -> int:
    """Return a seed derived from ``seed`` and ``number``."""
    made = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(made, "little") >> 1
