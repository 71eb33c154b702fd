"""The MeZO optimizer: training by forward passes alone (Malladi et al. 2023, arXiv 2305.17333).

Each step draws a direction ``z`` of normal numbers, measures the loss at ``w + epsilon z`` and ``w - epsilon z``, and
moves along ``z`` in proportion to the difference. A step is thus described by a seed and one number (``Delta``).

``z`` is drawn in slices of ``SLICE_ELEMENTS``. The key of a slice is the parameter's seed, its number of steps, and the
number of the slice, so any part of ``z`` can be drawn again at any time. Displaced weights are copies, and ``w`` itself
stays: the usual method, which adds and subtracts in place, leaves a rounding error in every step.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..accelerators import devices_of
from ..errors import OptimizerNotSupported
from ..state.tensor_entries import PENDING, SEED, STEP
from .declared_state import Group, ShapedStateOptimizer, Slots

SLICE_ELEMENTS = 256 * 1024
"""The elements of a slice. It is part of the format: another size draws other numbers."""


class MeZO(ShapedStateOptimizer):
    """The MeZO optimizer. ``step`` takes a closure that returns the loss, and calls it twice:

    * ``g = (loss(w + epsilon z) - loss(w - epsilon z)) / (2 epsilon)``
    * ``w = w - lr (g z + weight_decay w)``

    Both calls see the same random numbers of torch, and no gradients are computed. ``step`` returns the mean of the two
    losses; if one of them is not finite, nothing is updated. Parameters that do not require grad are unchanged. ``lr``
    is usually a hundred times smaller than for Adam.

    >>> parameter = torch.nn.Parameter(torch.ones(4))
    >>> optimizer = MeZO([parameter], lr=0.01)
    >>> bool(optimizer.step(lambda: parameter.square().sum()) > parameter.square().sum())
    True
    """

    cut = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-6,
        epsilon: float = 1e-3,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        if float(lr) < 0 or weight_decay < 0 or not epsilon > 0:
            raise ValueError(
                f"lr = {lr} and weight_decay = {weight_decay} must not be negative, epsilon = {epsilon} positive"
            )
        super().__init__(params, {"lr": lr, "epsilon": epsilon, "weight_decay": weight_decay, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and give each of its parameters its own seed, derived from its position."""
        epsilon_of([*self.param_groups, {**self.defaults, **param_group}])
        place = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        for number, param in enumerate(param_group["params"], place):
            seed = _drawn(param_group["seed"], number)
            self.state[param] = {
                STEP: torch.tensor(0.0, device="cpu"),
                SEED: torch.tensor(seed, device="cpu"),
            }

    @staticmethod
    def forms(group: Group, shape: tuple[int, ...]) -> Slots:
        return Slots({}, {STEP: torch.float32, SEED: torch.int64})

    def update(self, param: Any, grad: Any, state: Any, group: Any) -> None:
        raise OptimizerNotSupported("MeZO takes no gradients: call step(closure), or holdfast.offload.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> float:  # type: ignore[override]
        """Do one step for every parameter that requires grad. ``closure`` returns the loss of the step."""
        if closure is None:
            raise ValueError(
                "MeZO.step takes a closure: a function that returns the loss and is called twice"
            )
        moving = [
            (param, number)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.requires_grad
        ]
        for param, _ in moving:
            self._refuse(param)
        kept = [param.detach().clone(memory_format=torch.contiguous_format) for param, _ in moving]
        epsilon = epsilon_of(self.param_groups)
        try:
            devices = devices_of(param for param, _ in moving)
            kind = devices[0].type if devices else "cuda"
            with torch.random.fork_rng(devices, device_type=kind):
                plus = self._loss_at(epsilon, moving, kept, closure)
            minus = self._loss_at(-epsilon, moving, kept, closure)
        finally:
            for (param, _), value in zip(moving, kept, strict=True):
                param.copy_(value)
        delta = Delta.of(plus, minus, self.param_groups)
        for (param, group), value in zip(moving, kept, strict=True):
            delta.apply(value, self.state[param][SEED], self.state[param][STEP], group)
            param.copy_(value)
        return (plus + minus) / 2

    def _loss_at(
        self,
        by: float,
        moving: Sequence[tuple[torch.Tensor, int]],
        kept: Sequence[torch.Tensor],
        closure: Callable[[], Any],
    ) -> float:
        for (param, _), value in zip(moving, kept, strict=True):
            there = torch.empty_like(value)
            displace(value, self.state[param][SEED], self.state[param][STEP], [(by, there)])
            param.copy_(there)
        return float(closure())


@dataclass(frozen=True)
class Delta:
    """The change that one step makes.

    ``slope`` is the derivative of the loss along ``z``; None if the step was skipped. ``groups`` hold ``lr`` and
    ``weight_decay`` of each parameter group.
    """

    slope: float | None
    groups: tuple[dict[str, float], ...]
    drawn: str = ""
    """The ``noise_digest`` of the processor that ``z`` was drawn on; empty in commits of earlier versions."""

    @classmethod
    def of(cls, plus: float, minus: float, groups: Sequence[Mapping[str, Any]]) -> Delta:
        """Return the change that follows from the losses at the two displaced points."""
        finite = math.isfinite(plus) and math.isfinite(minus)
        slope = (plus - minus) / (2 * epsilon_of(groups)) if finite else None
        rates = tuple({name: float(g[name]) for name in ("lr", "weight_decay")} for g in groups)
        return cls(slope, rates, noise_digest())

    def apply(self, value: torch.Tensor, seed: torch.Tensor, step: torch.Tensor, group: int) -> None:
        """Apply the step to a parameter of ``group`` and to its step count, in place."""
        self.apply_part(value.view(-1), 0, value.numel(), int(seed), int(step), group)
        step.add_(1)

    def apply_part(
        self, values: torch.Tensor, first: int, elements: int, seed: int, step: int, group: int
    ) -> None:
        """Apply the step to ``values``, the elements from ``first`` on of a parameter that has ``elements``."""
        if self.slope is None:
            return
        rate, decay = self.groups[group]["lr"], self.groups[group]["weight_decay"]
        for start, stop in _slices(first, first + len(values), elements):
            here = slice(max(start - first, 0), stop - first)
            z = noise(seed, step, start, stop)[max(first - start, 0) : first + len(values) - start]
            value = values[here].float()
            value = value * (1 - rate * decay) if decay else value
            values[here].copy_(value - z.to(value.device).mul_(rate * self.slope))

    def to_json(self) -> dict[str, Any]:
        return {"slope": self.slope, "groups": list(self.groups), "drawn": self.drawn}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Delta:
        return cls(item["slope"], tuple(item["groups"]), str(item.get("drawn", "")))

    def warn_of_other_noise(self, where: str) -> None:
        """Warn if the last step of the commit ``where`` was drawn on another kind of processor than this one."""
        if self.slope is not None and self.drawn not in ("", noise_digest()):
            warnings.warn(
                f"{where}: the last step of MeZO is drawn again here, and normal numbers of this processor or torch"
                " version differ in their last bits from those of training, so last bits of the weights may, too. For"
                " the same bits resume on the machine that trained, and call save() or close() of the engine there.",
                stacklevel=3,
            )


def displace(
    value: torch.Tensor, seed: torch.Tensor, step: torch.Tensor, targets: Iterable[tuple[float, torch.Tensor]]
) -> None:
    """Fill each of ``targets`` with ``value``, displaced along its direction in this step.

    A target is a distance and the tensor to fill.
    """
    flat, places = value.view(-1), [(by, target.view(-1)) for by, target in targets]
    for start, stop in _slices(0, value.numel(), value.numel()):
        z = noise(int(seed), int(step), start, stop).to(value.device)
        for by, target in places:
            target[start:stop].copy_(flat[start:stop].float() + z * by)


def noise(seed: int, step: int, start: int, stop: int) -> torch.Tensor:
    """Return the direction of a parameter in the slice from ``start`` to ``stop``, drawn on the host for all devices.

    ``seed`` is the parameter's seed, ``step`` the number of steps that it has done.
    """
    generator = torch.Generator().manual_seed(_drawn(seed, step, start // SLICE_ELEMENTS))
    # the script that trains and a command that reads the run may have different default dtypes
    return torch.randn(stop - start, generator=generator, device="cpu", dtype=torch.float32)


@cache
def noise_digest() -> str:
    """Return a digest of fixed normal numbers, by which processors that round them otherwise are told apart."""
    return hashlib.blake2b(noise(0, 0, 0, 8192).numpy().tobytes(), digest_size=8).hexdigest()


def epsilon_of(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the epsilon of all groups, which must be equal because one difference is measured along all of ``z``.

    Raises ``ValueError`` if epsilons differ or are not positive.
    """
    found = {float(group["epsilon"]) for group in groups}
    if len(found) != 1 or not min(found) > 0:
        raise ValueError(f"epsilon is one for all parameter groups, and positive; these have {sorted(found)}")
    return found.pop()


def pending_of(progress: Mapping[str, Any]) -> tuple[Delta | None, dict[str, int]]:
    """Return the change that the files of a commit with this ``progress`` lack, and the group of each parameter."""
    if PENDING not in progress:
        return None, {}
    members = {name: g for g, names in enumerate(progress["group_parameters"]) for name in names}
    return Delta.from_json(progress[PENDING]), members


def _slices(first: int, stop: int, elements: int) -> Iterator[tuple[int, int]]:
    """Yield the slices of a parameter of ``elements`` that contain elements ``first`` to ``stop``."""
    for start in range(first // SLICE_ELEMENTS * SLICE_ELEMENTS, stop, SLICE_ELEMENTS):
        yield start, min(start + SLICE_ELEMENTS, elements)


def _drawn(*numbers: int) -> int:
    """Return a seed derived from ``numbers``."""
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
