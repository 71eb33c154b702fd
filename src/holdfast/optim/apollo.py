"""APOLLO and APOLLO-Mini (Zhu et al. 2024, arXiv 2412.05270): Adam's scaling of a matrix, estimated in few dimensions.

Adam divides each element of a gradient by its own number. APOLLO has one factor for each channel of a matrix, or one
for the whole matrix. It estimates the factors from a random projection of the gradient to ``rank`` rows. Only the
moments of the projection are stored: ``2 rank n`` numbers for a matrix of ``m x n`` instead of ``2 m n``. An update
needs the whole matrix at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..state.tensor_entries import STEP
from .adamw import adamw_
from .projected import ProjectedOptimizer, drawn, is_projected, rows_of
from .state_forms import Form, Slots

NORM_GROWTH = 1.01
"""The largest growth of an update's norm from one step to the next; gamma in the paper."""


class Apollo(ProjectedOptimizer):
    """The APOLLO optimizer.

    The update in step t, for a matrix with gradient ``G`` that has no more rows than columns (else transposed):

    * ``Y = R G``, where ``R`` has ``rank`` rows of normal numbers of variance ``1 / rank``, new every ``update_gap``
      steps;
    * ``m = b1 m + (1 - b1) Y``, ``v = b2 v + (1 - b2) Y^2``, ``N = m / (sqrt(v) + eps)``;
    * ``s_j = |N_j| / (|Y_j| + 1e-8)`` of the norms of each column, or one of the matrices with ``channels=False``;
    * ``U = G diag(s) sqrt(scale)``; its norm is limited to 1.01 times that of the step before;
    * ``w = w - lr sqrt(1 - b2^t) / (1 - b1^t) U - lr weight_decay w``.

    AdamW updates parameters that are no matrices, and groups with ``rank=None``, which the paper uses for embeddings.
    ``R`` is drawn again in each step from a number that each parameter keeps as ``seed``. That number is derived from
    the group's ``seed`` and the parameter's position, so ``R`` is the same after a resume.

    >>> parameter = torch.nn.Parameter(torch.ones(4, 6))
    >>> parameter.grad = torch.ones(4, 6)
    >>> optimizer = Apollo([parameter], rank=2)
    >>> optimizer.step()
    >>> optimizer.state[parameter]["exp_avg"].shape
    torch.Size([2, 6])
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        rank: int | None = 256,
        scale: float = 1.0,
        channels: bool = True,
        update_gap: int = 200,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank, "scale": scale,
            "channels": channels, "update_gap": update_gap, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)

    @staticmethod
    def forms(group: Mapping[str, Any], shape: tuple[int, ...]) -> Slots:
        if not is_projected(group, shape):
            moment, scalars = Form(shape), {STEP: torch.float32}
        else:
            moment = Form((rows_of(group, shape), max(shape)))
            scalars = {STEP: torch.float32, "seed": torch.int64, "norm": torch.float32}
        return Slots({"exp_avg": moment, "exp_avg_sq": moment}, scalars)

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, torch.Tensor],
        group: Mapping[str, Any],
    ) -> None:
        if "norm" not in state:
            adamw_(param, grad, state["exp_avg"], state["exp_avg_sq"], state[STEP], group)
            return
        state[STEP].add_(1)
        step, (beta1, beta2) = int(state[STEP]), group["betas"]
        tall = grad.size(0) > grad.size(1)
        wide = grad.float().T if tall else grad.float()
        update = (wide * self._factors(wide, state, group)).mul_(math.sqrt(group["scale"]))
        _limit(update, state["norm"])
        rate = float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        param.mul_(1 - float(group["lr"]) * group["weight_decay"])
        param.add_(update.T if tall else update, alpha=-rate)

    @staticmethod
    def _factors(
        wide: torch.Tensor, state: dict[str, torch.Tensor], group: Mapping[str, Any]
    ) -> torch.Tensor:
        """Update the moments and return the factors of the gradient's columns, or one factor for all of it."""
        (beta1, beta2), first, second = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        period = (int(state[STEP]) - 1) // group["update_gap"]
        low = projection(len(first), len(wide), drawn(int(state["seed"]), period)).to(wide.device) @ wide
        first.lerp_(low, 1 - beta1)
        second.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        scaled = first / (second.sqrt() + group["eps"])
        if group["channels"]:
            return scaled.norm(dim=0) / (low.norm(dim=0) + 1e-8)
        return scaled.norm() / (low.norm() + 1e-8)


def apollo_mini(
    params: Any, lr: float | torch.Tensor = 1e-3, *, rank: int = 1, scale: float = 128.0, **options: Any
) -> Apollo:
    """Return APOLLO-Mini: one factor for each matrix, from a single row. ``options`` are those of ``Apollo``."""
    return Apollo(params, lr, rank=rank, scale=scale, channels=False, **options)


def projection(rank: int, rows: int, seed: int) -> torch.Tensor:
    """Return ``rank`` rows of normal numbers of variance ``1 / rank``, drawn on the host: equal on all devices."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, rows, generator=generator) / math.sqrt(rank)


def _limit(update: torch.Tensor, norm: torch.Tensor) -> None:
    """Limit the norm of ``update`` to ``NORM_GROWTH`` times ``norm``, that of the step before, and update ``norm``.

    ``norm`` is 0 in the first step, which has no limit.
    """
    now, before = float(update.norm()), float(norm)
    growth = max(now / (before + 1e-8) / NORM_GROWTH, 1.0) if before else 1.0
    norm.fill_(now / growth)
    update.div_(growth)
