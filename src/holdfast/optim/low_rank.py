"""Optimizers that keep the moments of a matrix in few rows: APOLLO, APOLLO-Mini and Grass.

All store about ``2 rank n`` numbers for a matrix of ``m x n`` instead of ``2 m n``, and project anew every
``update_gap`` steps. Adam divides each element of a gradient by its own number; APOLLO (Zhu et al. 2024, arXiv
2412.05270) has one factor for each channel, or one for the whole matrix, estimated from a random projection of the
gradient. Grass (Muhamed et al. 2024, arXiv 2406.17660) is Adam in a few chosen rows; the paper also computes only these
rows in the backward pass, here autograd computes the whole gradient. An update needs the whole matrix at once. Draws
depend only on seeds that are state, so a resume draws the same.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from typing import Any

import torch

from ..state.tensor_entries import STEP
from .adamw import adamw_, check_adam
from .declared_state import Form, Group, ShapedStateOptimizer, Slots, State

MOMENTS = ("exp_avg", "exp_avg_sq")


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
                seed = torch.tensor(drawn(param_group["seed"], number), device="cpu")
                self.state[param] = {STEP: torch.tensor(0.0, device="cpu"), "seed": seed}

    @classmethod
    def forms(cls, group: Group, shape: tuple[int, ...]) -> Slots:
        if len(shape) == 2 and group["rank"] is not None:
            return cls.matrix_slots(group, min(group["rank"], *shape), max(shape))
        return Slots(dict.fromkeys(MOMENTS, Form(shape)), {STEP: torch.float32})

    @staticmethod
    @abstractmethod
    def matrix_slots(group: Group, rows: int, columns: int) -> Slots:
        """Return the state of a matrix whose moments have ``rows`` rows and ``columns`` columns."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        if state.keys() == {*MOMENTS, STEP}:
            adamw_(param, grad, state["exp_avg"], state["exp_avg_sq"], state[STEP], group)
        else:
            self.update_matrix(param, grad, state, group)

    @abstractmethod
    def update_matrix(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        """Do one step for a matrix that has the state of ``matrix_slots``."""


def drawn(seed: int, number: int) -> int:
    """Return a seed derived from ``seed`` and ``number``."""
    made = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(made, "little") >> 1


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
    def matrix_slots(group: Group, rows: int, columns: int) -> Slots:
        scalars = {STEP: torch.float32, "seed": torch.int64, "norm": torch.float32}
        return Slots(dict.fromkeys(MOMENTS, Form((rows, columns))), scalars)

    def update_matrix(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
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
    def _factors(wide: torch.Tensor, state: State, group: Group) -> torch.Tensor:
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
    return torch.randn(rank, rows, generator=generator, device="cpu") / math.sqrt(rank)


def _limit(update: torch.Tensor, norm: torch.Tensor) -> None:
    """Limit the norm of ``update`` to ``NORM_GROWTH`` times ``norm``, that of the step before, and update ``norm``.

    ``norm`` is 0 in the first step, which has no limit.
    """
    now, before = float(update.norm()), float(norm)
    growth = max(now / (before + 1e-8) / NORM_GROWTH, 1.0) if before else 1.0
    norm.fill_(now / growth)
    update.div_(growth)


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
    def matrix_slots(group: Group, rows: int, columns: int) -> Slots:
        tensors = {**dict.fromkeys(MOMENTS, Form((rows, columns))), "rows": Form((rows,), torch.int64)}
        if not group["sampled"]:
            return Slots(tensors, {STEP: torch.float32})
        return Slots({**tensors, "scales": Form((2, rows))}, {STEP: torch.float32, "seed": torch.int64})

    def update_matrix(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
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


def _adam(low: torch.Tensor, first: torch.Tensor, second: torch.Tensor, step: int, group: Group) -> None:
    """Update the moments with the gradient ``low``, and replace ``low`` by Adam's update of that ``step``."""
    beta1, beta2 = group["betas"]
    first.lerp_(low, 1 - beta1)
    second.mul_(beta2).addcmul_(low, low, value=1 - beta2)
    torch.sqrt(second, out=low)
    low.div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    torch.div(first, low, out=low)
    low.div_(1 - beta1**step)


def _choose(wide: torch.Tensor, state: State, period: int) -> None:
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
    if not norms.sum() > 0:  # all norms are zero, or one is not a number
        norms = torch.ones_like(norms)
    chances = torch.rand(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    upto = norms.cumsum(0)
    total = upto[-1:]
    rows = torch.searchsorted(upto, chances * total, right=True).clamp_(max=len(norms) - 1).sort().values
    scales = (count * norms[rows] / total).rsqrt()
    _, times = rows.unique_consecutive(return_counts=True)
    often = torch.zeros_like(scales)
    often[times.cumsum(0) - times] = times.double()
    return rows, torch.stack([scales, scales * often])
