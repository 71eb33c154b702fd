"""The operation that makes a step's files the newest state, and the redo of updates that were made on a wrong guess.

The commit of a step is its manifest. With several ranks each makes its share durable, and the first publishes. No
commit names a file that is not durable, and all ranks must publish the same step.

Updates that were made before the gradient norm was known may have to be clipped or skipped. The commit of the step
before is still whole: none of its files is written before the next commit is published. So the state before the guess
is read from that commit, whether it lives on the SSD or in host memory. The new state goes to the file that the guess
has written, which no commit names. After a kill at any moment, that commit is still whole. Run by the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from ... import failpoints
from ...distributed import stream_of
from ...errors import RankFailed
from ...schedule.operations import Op
from ...state.tensor_entries import PENDING
from ...store.commit.commit_writer import Written
from ..memory.block_states import as_tensor
from ..runtime import Runtime, Step, of
from . import gradient_ops, state_ops


def commit(run: Runtime, op: Op, step: Step) -> None:
    """Publish the step, whose files are all written and synced. When this returns, it survives power loss."""
    # taken when the step began, when it was not known whether it would be skipped; or when the loop's code was over
    progress = step.progress | step.transient if step.late_progress is None else step.late_progress.result()
    progress["skipped_steps"] += step.skipped
    progress |= step.all_results()
    if step.loss_scale is not None:
        progress["loss_scale"] = step.loss_scale.after(step.skipped).progress()
    if step.delta is not None:
        progress[PENDING] = step.delta.to_json()
    publish(run, step.number + 1, progress)


def publish(run: Runtime, steps_done: int, progress: dict) -> None:
    """Publish the newest file of every unit as the state after ``steps_done`` steps; durable on return.

    With several ranks, the first publishes the files of all, once each has made its shard durable. Collective: every
    rank must call this.
    """
    files = {name: (newest.generation, newest.checksums) for name, newest in run.newest.items()}
    if run.data_parallel.alone:
        run.store.publish(steps_done, files, run.index, progress, again=steps_done == run.durable_step)
    else:
        _publish_share(run, steps_done, files, progress)
    run.durable_step = steps_done


def _publish_share(run: Runtime, steps_done: int, files: Written, progress: dict) -> None:
    ranks, store = run.data_parallel.commits, run.store
    steps = dict.fromkeys(files, steps_done)
    gathered = ranks.all_do(
        lambda: (steps_done, store.share(steps_done, files, run.index, progress, steps).ref)
    )
    _refuse_unlike([step for step, _ in gathered])
    shares = {stream_of(rank): ref for rank, (_, ref) in enumerate(gathered)}
    ranks.first_does(lambda: store.publish_shares(shares).step)
    if ranks.rank:
        store.follow()
    for name, (generation, _) in files.items():
        run.stored[name].release(generation)


def _refuse_unlike(steps: Sequence[int]) -> None:
    """Raise ``RankFailed`` unless all ranks would publish the same step."""
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise RankFailed(
                f"rank {rank} has step {step} to make durable, and rank 0 step {steps[0]}: together they are the state"
                " of no step, so none was made. Every step that was durable still is; start all ranks again to resume."
            )


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
