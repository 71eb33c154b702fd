"""The commit: the manifest that makes a step's files the newest state."""

from __future__ import annotations

from ...plan.ops import Op
from ..runtime import Runtime, Step


def commit(run: Runtime, op: Op, step: Step) -> None:
    """Publish the step, whose files are all written and synced. When this returns, it survives power loss."""
    progress = step.progress  # taken when the step began: whether it would be skipped was not known
    progress["skipped_steps"] += step.skipped
    if step.loss_scale is not None:
        progress["loss_scale"] = step.loss_scale.after(step.skipped).progress()
    publish(run, step.number + 1, progress)


def publish(run: Runtime, steps_done: int, progress: dict) -> None:
    """Make the newest file of every unit the state after ``steps_done`` steps; durable when this returns."""
    files = {name: (newest.generation, newest.checksums) for name, newest in run.newest.items()}
    run.store.publish(steps_done, files, run.index, progress)
    run.durable_step = steps_done
