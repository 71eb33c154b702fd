"""Weights of micro-batches: how much each counts in its step.

By target tokens, the step's loss is the mean over all of them, whatever micro-batch they are in. A model's loss leaves
out targets of -100. Most causal language models also leave out the first label of each row, because they shift labels,
and some do not. So the model is asked: its loss with only the first labels is compared with its loss without any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import BadInput

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
