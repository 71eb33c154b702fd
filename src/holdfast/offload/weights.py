"""Weights: what each micro-batch counts in its step.

By target tokens, the step's loss is the mean over all of them, whatever micro-batch they are in. A model's loss
leaves out those of -100, and a causal language model those that nothing precedes, since it shifts its labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import BadInput

IGNORED = -100
"""The target that no loss of torch or transformers counts."""

SHIFTING = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")
"""Ends of the names of models, of transformers and after its manner, that shift their labels."""

UNSHIFTED = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice",
    "ForImageClassification", "ForAudioClassification",
)  # fmt: skip


def shares(counts: Sequence[float]) -> list[float | None]:
    """The part of the whole that each count is. Raises ``BadInput`` for what is no count."""
    for number, count in enumerate(counts):
        if not (isinstance(count, (int, float)) and math.isfinite(count) and count >= 0):
            raise BadInput(
                f"normalize= gave {count!r} for micro-batch {number}; it must be a number, 0 or more"
            )
    return [count / (sum(counts) or 1) for count in counts]


def mean_of(losses: Sequence[float], weights: Sequence[float | None]) -> float:
    """The mean loss of micro-batches that count what ``weights`` say; None is all the same. Those that count nothing
    are left out, whatever their loss."""
    if all(weight is None for weight in weights):
        return sum(losses) / len(losses)
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)


def target_tokens(shifts: bool | None, batch: Any) -> int:
    """Target tokens of a micro-batch; ``shifts`` is what is known of its model."""
    if isinstance(batch, dict) and "targets" in batch:
        return int((batch["targets"] != IGNORED).sum())
    if not isinstance(batch, dict) or batch.get("labels") is None:
        raise BadInput(
            'normalize="tokens" needs "labels" or "targets" in every micro-batch; otherwise pass a function from a '
            "micro-batch to its number of target tokens"
        )
    if shifts is None:
        raise BadInput(
            'normalize="tokens" does not know whether this model shifts its "labels". Pass a function from a '
            'micro-batch to its number of target tokens, such as lambda batch: int((batch["labels"] != -100).sum()).'
        )
    labels = batch["labels"]
    return int(((labels[..., 1:] if shifts else labels) != IGNORED).sum())


def shifts_labels(model: nn.Module) -> bool | None:
    """Whether ``model`` predicts each label from what precedes it; None if its name does not say so."""
    for module in model.modules():  # wrappers come first
        name, config = type(module).__name__, getattr(module, "config", None)
        if name.endswith("ForConditionalGeneration") and config is not None:
            return not getattr(config, "is_encoder_decoder", False)
        if name.endswith(UNSHIFTED) or name == "XLMWithLMHeadModel":
            return False
        if name.endswith(SHIFTING):
            return True
    return None
