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
    place = op.key.block, op.key.tile
    tile, before = run.blocks[op.key.block].tiles[op.key.tile], step.before[place]
    buffer = run.residency.redone[place] = run.residency.pool.take(tile.layout.file_bytes, "redone state")
    return run.stored[tile.name].read(before.generation, buffer.view, before.checksums, **of(op))


def load_grads(run: Runtime, op: Op, step: Step) -> Future | None:
    """Read spilled gradients back, if the update is made again."""
    return gradient_ops.load(run, op, step) if step.redone else None


def update(run: Runtime, op: Op, step: Step) -> None:
    """Update a tile of a block again with the norm known.

    In a skipped step the block only gets its old compute copy back. The last tile releases the gradients, whether the
    guess was right or not.
    """
    block = op.key.block
    unit = run.blocks[block]
    tile = unit.tiles[op.key.tile]
    if step.redone:
        failpoints.reach("before_redone_update")
        copy = state_ops.UpdatedCopy.of(run, block, tile)
        image = as_tensor(run.residency.redone[block, tile.index])
        if not step.skipped:
            state_ops.apply(run, step, unit, tile, image, run.residency.grads[block], copy)
        elif copy is not None:
            copy.fill(unit, tile, image)
        failpoints.reach("after_redone_update")
    if state_ops.is_last(unit, tile):
        run.residency.free_grads(block, in_inputs=False)


def store(run: Runtime, op: Op, step: Step) -> Future | None:
    """Write the corrected state over the guessed one. In a skipped step the old state is already stored."""
    if not step.redone:
        return None
    failpoints.reach("before_redone_write")
    place, pool = (op.key.block, op.key.tile), run.residency.pool
    name = run.blocks[op.key.block].tiles[op.key.tile].name
    before, image = step.before[place], run.residency.redone.pop(place)
    if run.newest[name] is not before:
        run.stored[name].release(run.newest[name].generation)
        run.newest[name] = before
    if run.placement.optimizer[op.key.block]:
        run.residency.images[place].view[:] = image.view
    if step.skipped:
        pool.give(image)
        return None
    future = state_ops.write_image(run, op, name, image.view)
    future.add_done_callback(lambda _: pool.give(image))
    return future
