"""The options of a ``Checkpointer`` that the callback of a trainer refuses.

The trainer's loop counts steps and batches in variables of its own. A rollback of the living process restores what
objects hold, and the loop would continue where it is. An object that stands for a loop says so by ``has_loop``, and
then ``Checkpointer.rollback`` and ``guard`` refuse. Called by the callbacks of trainers, before there is a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checkpoint.training_state import NO_GUARD
from ...errors import BadInput
from ...store.commit.retention import Keep, refuse_best

UNKNOWN = ("guard", "rollback")
"""Names of what a ``Checkpointer`` in a loop of the script's own has, and a callback has not."""
TAKEN = ("model", "optimizer", "scheduler", "loader", "scaler")
"""Options of a ``Checkpointer`` that come from the trainer."""


def refuse_callback_options(options: Mapping[str, Any]) -> None:
    """Raise ``BadInput`` for ``options`` of a callback that the trainer decides, or that its loop rules out."""
    if taken := sorted({*TAKEN} & options.keys()):
        raise BadInput(f"{taken[0]}= is the trainer's: leave it out of HoldfastCallback()")
    if isinstance(keep := options.get("keep"), Keep):
        refuse_best(keep, "the callback of a Trainer")
    if any(name in options for name in UNKNOWN):
        raise BadInput(NO_GUARD)
