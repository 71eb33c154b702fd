"""The reference log-probabilities of TRL's DPO where the reference is the model without its adapter.

TRL's loss calls the model twice, the second time with the adapter switched off. The engine calls it once in a pass.
So a pass of the engine without the adapter comes first, over all micro-batches, and each finds its log-probabilities
as if TRL had computed them before training (``precompute_ref_log_probs``). Called before steps and evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from ...errors import BadInput
from ...offload.engine import Engine

FLAG = "precompute_ref_logps"
"""The attribute of TRL's trainer that is True if batches have the reference's log-probabilities."""
NAMES = "ref_chosen_logps", "ref_rejected_logps"
"""The names that TRL gives them in a batch."""


def is_needed(trainer: Any) -> bool:
    """Return whether the trainer's loss calls its own model as the reference."""
    return getattr(trainer, FLAG, None) is False and getattr(trainer, "ref_model", None) is None


def refuse_reference(trainer: Any) -> None:
    """Raise ``BadInput`` if the reference is another adapter of the model."""
    if is_needed(trainer) and "ref" in getattr(trainer.model, "peft_config", ()):
        raise BadInput(
            "the reference is the adapter 'ref' of the model, which the engine does not switch to. Give"
            " precompute_ref_log_probs=True."
        )


@contextmanager
def references(trainer: Any, engine: Engine, batches: Sequence[Any]) -> Iterator[None]:
    """Give each of ``batches`` the reference's log-probabilities, which the trainer's loss uses in the context."""
    if not is_needed(trainer):
        yield
        return
    model = trainer.model
    with model.disable_adapter():
        vars(model)["disable_adapter"] = nullcontext  # the trainer's own call, in the middle of a pass
        try:
            made = engine.run_calls([partial(_log_probs, trainer, batch) for batch in batches])
        finally:
            del vars(model)["disable_adapter"]
    for batch, found in zip(batches, made, strict=True):
        batch.update(zip(NAMES, found, strict=True))
    setattr(trainer, FLAG, True)
    try:
        yield
    finally:
        setattr(trainer, FLAG, False)


def without_reference_flag(changed: dict[str, Any]) -> dict[str, Any]:
    """Return the ``changed`` attributes without the flag, which a step sets for its own time."""
    changed["values"].get("trainer", {}).pop(FLAG, None)
    return changed


def _log_probs(trainer: Any, batch: Any) -> tuple[Any, Any]:
    return trainer.compute_ref_log_probs(trainer.model, trainer._prepare_inputs(batch))
