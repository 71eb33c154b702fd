"""The factors of losses in a step: the scale of fp16 training, and the weights of micro-batches.

``LossScale`` has the arithmetic of ``torch.amp.GradScaler``. The loss is multiplied by the scale, and the summed
gradients by its reciprocal before they are measured. A step whose gradients are not finite is skipped and lowers the
scale; a row of steps that were not skipped raises it. Weighted by target tokens, the loss of a step is the mean over
all of them, whatever micro-batch they are in. Most causal language models leave out the first label of each row and
some do not, so the model is asked: its loss with only the first labels is compared with its loss without any. Called by
the engine at every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def rules_of(scale: LossScale) -> dict[str, Any]:
    """Return the rules by which ``scale`` changes, as JSON. A resume does not restore them."""
    names = ("growth_factor", "backoff_factor", "growth_interval")
    return {name: getattr(scale, name) for name in names}


def _fp32(value: float) -> float:
    """Return the nearest fp32 number."""
    return float(torch.tensor(value, dtype=torch.float32))


IGNORED = -100
"""The target that no loss of torch or transformers counts."""


def shares(counts: Sequence[float]) -> list[float | None]:
    """Return each count divided by the sum. Raises ``BadInput`` for a value that is no count."""
    for number, count in enumerate(counts):
        if not (isinstance(count, (int, float)) and math.isfinite(count) and count >= 0):
            raise BadInput(
                f"normalize= gave {count!r} for micro-batch {number}; it must be a number, 0 or more"
            )
    return [count / (sum(counts) or 1) for count in counts]


def mean_of(losses: Sequence[float], weights: Sequence[float | None]) -> float:
    """Return the mean loss of micro-batches with ``weights``; None counts all the same.

    Micro-batches of weight 0 are left out, whatever their loss.
    """
    if all(weight is None for weight in weights):
        return sum(losses) / len(losses)
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)


def target_tokens(shifts: bool | None, batch: Any) -> int:
    """Return the number of target tokens of a micro-batch, given whether its model ``shifts`` labels."""
    if isinstance(batch, dict) and "targets" in batch:
        return int((batch["targets"] != IGNORED).sum())
    if not isinstance(batch, dict) or batch.get("labels") is None:
        raise BadInput(
            'normalize="tokens" needs "labels" or "targets" in every micro-batch; otherwise pass a function from a '
            "micro-batch to its number of target tokens"
        )
    labels = batch["labels"]
    if shifts is None and depends_on_shift(batch):
        raise BadInput(
            'normalize="tokens" could not find out whether this model shifts its "labels". Pass a function from a '
            'micro-batch to its number of target tokens, such as lambda batch: int((batch["labels"] != -100).sum()).'
        )
    return int(((labels[..., 1:] if shifts and _is_of_tokens(labels) else labels) != IGNORED).sum())


def lacks_targets(inputs: Any) -> bool:
    """Return whether a micro-batch whose loss is no number has labels of which none counts.

    A mean over no labels is NaN. A first label is left out: a model that counts it has a loss.
    """
    named = inputs if isinstance(inputs, Mapping) else {}
    labels = named.get("targets", named.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return False
    return not bool(((labels[..., 1:] if _is_of_tokens(labels) else labels) != IGNORED).any())


def depends_on_shift(batch: Any) -> bool:
    """Return whether a model that shifts labels counts fewer of them in ``batch`` than one that does not."""
    if not isinstance(batch, dict) or "targets" in batch:
        return False
    labels: Any = batch.get("labels")
    return _is_of_tokens(labels) and bool((labels[..., 0] != IGNORED).any())


def _is_of_tokens(labels: Any) -> bool:
    return (
        isinstance(labels, torch.Tensor)
        and labels.dim() > 1
        and labels.shape[-1] > 0
        and not (labels.is_floating_point() or labels.is_complex())
    )


def questions(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return ``batch`` with the first label of each row alone, and without labels that count."""
    none = torch.full_like(batch["labels"], IGNORED)
    first = none.clone()
    first[..., 0] = batch["labels"][..., 0]
    return [{**batch, "labels": labels} for labels in (first, none)]


def first_label_counts(losses: Sequence[float]) -> bool:
    """Return whether the loss of a model depends on first labels, by its ``losses`` of both ``questions``."""
    first, none = losses
    return not (first == none or (math.isnan(first) and math.isnan(none)))
