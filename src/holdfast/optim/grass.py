"""Grass (Muhamed et al. 2024, arXiv 2406.17660): Adam in a few rows of a matrix, chosen anew every ``update_gap``
steps.

A projection that picks rows of the gradient costs nothing to apply. The state has ``2 rank n`` numbers for a matrix of
``m x n`` instead of ``2 m n``, and a step changes ``rank`` rows. The paper also computes only these rows of the
gradient in the backward pass; here autograd computes the whole gradient.
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


class Grass(ProjectedOptimizer):
    """The Grass optimizer.

    The update in step t, for a matrix with gradient ``G`` that has no more rows than columns (else transposed):

    * every ``update_gap`` steps, and in the first, ``rank`` rows ``i_1, i_2, ...`` are chosen by the norms of the rows
      of ``G``; ``m`` and ``v`` become 0, and the count ``k`` of steps since then becomes 1;
    * ``Y_j = p_j G_(i_j)``, ``m = b1 m + (1 - b1) Y``, ``v = b2 v + (1 - b2) Y^2``;
    * ``U = (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)``;
    * ``w = w - lr weight_decay w``, and then ``w_(i_j) = w_(i_j) - lr scale p_j U_j`` for each ``j``.

    The rows are those of the largest norms, and ``p_j`` is 1. With ``sampled=True`` they are drawn with replacement,
    row ``i`` with a probability ``q_i`` proportional to its norm, and ``p_j = 1 / sqrt(rank q_(i_j))``. Then the mean
    of projecting and back-projecting is the identity; a row that is drawn twice is moved twice.

    AdamW updates parameters that are no matrices, and groups with ``rank=None``. The chosen rows are state. Draws
    depend only on ``seed``, the parameter's position and the step.

    >>> parameter = torch.nn.Parameter(torch.zeros(3, 4))
    >>> parameter.grad = torch.tensor([[1.0], [3.0], [2.0]]).expand(3, 4).clone()
    >>> optimizer = Grass([parameter], lr=0.5, rank=2)
    >>> optimizer.step()
    >>> parameter.data[:, 0]
    tensor([ 0.0000, -0.5000, -0.5000])
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int | None = 256,
        scale: float = 1.0,
        sampled: bool = False,
        update_gap: int = 200,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank, "scale": scale,
            "sampled": sampled, "update_gap": update_gap, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)

    @staticmethod
    def forms(group: Mapping[str, Any], shape: tuple[int, ...]) -> Slots:
        if not is_projected(group, shape):
            return Slots({"exp_avg": Form(shape), "exp_avg_sq": Form(shape)}, {STEP: torch.float32})
        rows = rows_of(group, shape)
        moment = Form((rows, max(shape)))
        tensors = {"exp_avg": moment, "exp_avg_sq": moment, "rows": Form((rows,), torch.int64)}
        if not group["sampled"]:
            return Slots(tensors, {STEP: torch.float32})
        return Slots({**tensors, "scales": Form((2, rows))}, {STEP: torch.float32, "seed": torch.int64})

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, torch.Tensor],
        group: Mapping[str, Any],
    ) -> None:
        if "rows" not in state:
            adamw_(param, grad, state["exp_avg"], state["exp_avg_sq"], state[STEP], group)
            return
        period, since = divmod(int(state[STEP]), group["update_gap"])
        state[STEP].add_(1)
        tall = grad.size(0) > grad.size(1)
        wide = grad.T if tall else grad
        if not since:
            _choose(wide, state, period)
        low = wide.index_select(0, state["rows"]).float()
        if "scales" in state:
            low.mul_(state["scales"][0, :, None])
        _adam(low, state["exp_avg"], state["exp_avg_sq"], since + 1, group)
        if "scales" in state:
            low.mul_(state["scales"][1, :, None])
        rate = float(group["lr"])
        if group["weight_decay"]:
            param.mul_(1 - rate * group["weight_decay"])
        whole = param.T if tall else param
        whole.index_add_(0, state["rows"], low.to(param.dtype), alpha=-rate * group["scale"])


def _adam(
    low: torch.Tensor, first: torch.Tensor, second: torch.Tensor, step: int, group: Mapping[str, Any]
) -> None:
    """Update the moments with the gradient ``low``, and replace ``low`` by Adam's update of that ``step``."""
    beta1, beta2 = group["betas"]
    first.lerp_(low, 1 - beta1)
    second.mul_(beta2).addcmul_(low, low, value=1 - beta2)
    torch.sqrt(second, out=low)
    low.div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    torch.div(first, low, out=low)
    low.div_(1 - beta1**step)


def _choose(wide: torch.Tensor, state: dict[str, torch.Tensor], period: int) -> None:
    """Choose the rows of the next ``period`` from a gradient, on the host: equal on all devices."""
    norms = wide.float().norm(dim=1).double().cpu()
    count = len(state["rows"])
    if "scales" in state:
        rows, scales = sampled_rows(norms, count, drawn(int(state["seed"]), period))
        state["scales"].copy_(scales)
    else:
        rows = norms.sort(descending=True, stable=True).indices[:count].sort().values
    state["rows"].copy_(rows)
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()


def sampled_rows(norms: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``count`` rows with replacement in proportion to ``norms``; return them ascending, with two rows of scales.

    The first scales multiply gradients, the second updates. A row that is drawn several times is moved as often by the
    first of its updates; the others are multiplied by 0, so that the order of addition does not matter.
    """
    if not norms.sum() > 0:  # all norms are zero
        norms = torch.ones_like(norms)
    chances = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    upto = norms.cumsum(0)
    total = upto[-1:]
    rows = torch.searchsorted(upto, chances * total, right=True).clamp_(max=len(norms) - 1).sort().values
    scales = (count * norms[rows] / total).rsqrt()
    _, times = rows.unique_consecutive(return_counts=True)
    often = torch.zeros_like(scales)
    often[times.cumsum(0) - times] = times.double()
    return rows, torch.stack([scales, scales * often])
