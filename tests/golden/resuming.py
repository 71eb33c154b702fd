"""A process without a wrapper that resumes a golden run of ``dist.training.Net``."""

from __future__ import annotations

from typing import Any

from dist.training import OPTIMIZERS, schedule_of, whole_state, wrapped
from holdfast.checkpointer import Checkpointer


def resumed(root: Any, **order: Any) -> tuple[int, str]:
    """The step that is resumed, and a digest of parameters and optimizer state."""
    model = wrapped("plain", 1)
    optimizer = OPTIMIZERS["powers"](model.parameters())
    schedule = schedule_of(optimizer, "powers")
    with Checkpointer(root, model=model, optimizer=optimizer, scheduler=schedule) as checkpointer:
        return checkpointer.resume(**order), whole_state(model, optimizer)
