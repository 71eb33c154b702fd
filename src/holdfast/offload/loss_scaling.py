"""Loss scaling: values that are too small for fp16 are computed enlarged, and scaled back in fp32.

The arithmetic is that of ``torch.amp.GradScaler``. The loss is multiplied by the scale, and the summed gradients by its
reciprocal before they are measured. A step whose gradients are not finite is skipped and lowers the scale; a row of
steps that were not skipped raises it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import BadInput

LEAST = 2.0**-149
"""Smallest fp32 scale that is not 0."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of fp16 training, and how it moves. A resumed run has its own ``scale`` and ``good_steps``.

    >>> LossScale(scale=8.0).after(skipped=True).scale
    4.0
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    """Factor for the scale after ``growth_interval`` steps in a row that were not skipped."""
    backoff_factor: float = 0.5
    """Factor for the scale at a skipped step."""
    growth_interval: int = 2000
    good_steps: int = 0
    """Steps since the scale was last changed."""

    def __post_init__(self) -> None:
        for name, fits, must in (
            ("scale", 0 < self.scale < math.inf, "be a positive number"),
            ("growth_factor", 1 < self.growth_factor < math.inf, "be above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "lie between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "be at least 1"),
            ("good_steps", self.good_steps >= 0, "not be negative"),
        ):
            if not fits:
                raise BadInput(f"LossScale: {name} = {getattr(self, name)!r} must {must}")
        object.__setattr__(self, "scale", _fp32(self.scale))

    def after(self, skipped: bool) -> LossScale:
        """Return the loss scale of the next step."""
        if skipped:
            return replace(self, scale=max(_fp32(self.scale * self.backoff_factor), LEAST), good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        grown = _fp32(self.scale * self.growth_factor)
        return replace(self, scale=grown if math.isfinite(grown) else self.scale, good_steps=0)

    def enlarge(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` multiplied by the scale."""
        return loss * torch.full((), self.scale, dtype=torch.float32, device=loss.device)

    def reduce(self, grad: torch.Tensor) -> None:
        """Divide the fp32 sum of scaled gradients by the scale, in place."""
        grad.mul_(_fp32(1 / self.scale))

    def progress(self) -> dict[str, Any]:
        """Return the part that a commit keeps, as JSON."""
        return {"scale": self.scale, "good_steps": self.good_steps}


def _fp32(value: float) -> float:
    """Return the nearest fp32 number."""
    return float(torch.tensor(value, dtype=torch.float32))
