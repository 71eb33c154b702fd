"""The redo of updates that were made before the gradient norm was known, where they must be clipped or skipped.

The commit of the step before is still whole: none of its files is written before the next commit is published. So the
state before the guess is read from that commit, whether it lives on the SSD or in host memory. The new state goes to
the file that the guess has written, which no commit names. After a kill at any moment, that commit is still whole.
"""

from __future__ import annotations

from concurrent.futures import Future

from ... import failpoints
from ...schedule.operations import Op
from ..memory.block_states import as_tensor
from ..runtime import Runtime, Step, of
from . import gradient_ops, state_ops


def load(run: Runtime, op: Op, step: Step) -> Future | None:
    """Read the state before the guess, and verify every byte."""
    if not step.redone:
        return None
    failpoints.reach("before_redo")
    block = op.key.block
    unit, before = run.blocks[block], step.before[block]
    buffer = run.residency.redone[block] = run.residency.pool.take(unit.layout.file_bytes, "redone state")
    return run.stored[unit.file_name].read(before.generation, buffer.view, before.checksums, **of(op))


def load_grads(run: Runtime, op: Op, step: Step) -> Future | None:
    """Read spilled gradients back, if the update is made again."""
    return gradient_ops.load(run, op, step) if step.redone else None


def update(run: Runtime, op: Op, step: Step) -> None:
    """Update a block again with the norm known, and release its gradients, whether the guess was right or not.

    In a skipped step the block only gets its old compute copy back.
    """
    block = op.key.block
    if step.redone:
        failpoints.reach("before_redone_update")
        unit, copy = run.blocks[block], state_ops.copy_to_update(run, block)
        image = as_tensor(run.residency.redone[block])
        if not step.skipped:
            state_ops.apply(run, step, unit, image, run.residency.grads[block], copy)
        elif copy is not None:
            unit.write_trained_copy(image, copy)
        failpoints.reach("after_redone_update")
    run.residency.free_grads(block, lent=False)


def store(run: Runtime, op: Op, step: Step) -> Future | None:
    """Write the corrected state over the guessed one. In a skipped step the old state is already stored."""
    if not step.redone:
        return None
    failpoints.reach("before_redone_write")
    block, pool = op.key.block, run.residency.pool
    unit, before, image = run.blocks[block], step.before[block], run.residency.redone.pop(block)
    if run.newest[unit.file_name] is not before:
        run.stored[unit.file_name].release(run.newest[unit.file_name].generation)
        run.newest[unit.file_name] = before
    if run.placement.optimizer[block]:
        run.residency.images[block].view[:] = image.view
    if step.skipped:
        pool.give(image)
        return None
    future = state_ops.write_image(run, op, unit.file_name, image.view)
    future.add_done_callback(lambda _: pool.give(image))
    return future
