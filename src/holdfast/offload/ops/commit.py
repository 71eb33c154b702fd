"""The commit: the manifest that makes a step's files the newest state."""

from __future__ import annotations

from ...plan.ops import Op
from ..runtime import Runtime, Step


def commit(run: Runtime, op: Op, step: Step) -> None:
    """Publish the step. When this returns, it survives power loss."""
    run.publish(step)
    step.committed = True
