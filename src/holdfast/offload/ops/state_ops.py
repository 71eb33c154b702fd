"""The operations on master parameters and optimizer state: brought to the host, updated, and written to a new file.

The file that a step writes is named by no commit until the step's own is published, so the state before the update
stays whole. Run by the executor, on the threads of their lanes.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from ...schedule.operations import GUESS, Op
from ..memory.block_states import BlockState, as_tensor
from ..memory.residency import Gradients
from ..runtime import Runtime, Step, StoredBlock, of


def load(run: Runtime, op: Op, step: Step) -> Future:
    """Read a state image from the unit's newest file, and verify every byte."""
    block = op.key.block
    unit = run.blocks[block]
    buffer = run.residency.pool.take(unit.layout.file_bytes, "optimizer state")
    run.residency.images[block] = buffer
    newest = run.newest[unit.file_name]
    return run.stored[unit.file_name].read(newest.generation, buffer.view, newest.checksums, **of(op))


def update(run: Runtime, op: Op, step: Step) -> None:
    """Apply the optimizer to a block: to its state image in place, and to its compute copy.

    A guess keeps the gradients.
    """
    block, guess = op.key.block, op.key.phase == GUESS
    unit = run.blocks[block]
    if guess:
        step.before[block] = run.newest[unit.file_name]
    if not step.leaves(unit):
        image = as_tensor(run.residency.images[block])
        apply(run, step, unit, image, run.residency.grads[block], copy_to_update(run, block), guess)
    if not guess:
        run.residency.free_grads(block, lent=any(name[0] == "kept_inputs" for name in op.gives))


def copy_to_update(run: Runtime, block: int) -> torch.Tensor | None:
    """Return the memory for a block's updated compute copy; None if this rank has no trained part of it.

    It is where the copy stays, or a buffer on its way to the SSD.
    """
    unit = run.blocks[block]
    if run.placement.params[block]:
        return as_tensor(run.residency.copies[block])
    if not unit.share_trained_copy_bytes:
        return None
    buffer = run.residency.outgoing[block] = run.residency.pool.take(
        unit.share_trained_copy_bytes, "updated parameters"
    )
    return as_tensor(buffer)


def apply(
    run: Runtime,
    step: Step,
    unit: BlockState,
    image: torch.Tensor,
    grads: Gradients,
    copy: torch.Tensor | None,
    guess: bool = False,
) -> None:
    """Do one optimizer step of every parameter that has a gradient. A guess uses the gradients unclipped."""
    assert step.hyper is not None
    scale = None if guess else step.factor(unit)
    for piece in unit.pieces:
        state = unit.parameter_state(piece, image, grads.flat, copy, whole_copy=unit is run.resident)
        if piece.name in grads.touched:
            run.optimizer.update(state, step.hyper, scale, keep_grad=guess)
        elif state.copy is not None:
            state.copy.copy_(state.param)


def store(run: Runtime, op: Op, step: Step) -> Future | None:
    """Write an updated state image to a file that no kept commit names, and sync it."""
    block = op.key.block
    stays = run.placement.optimizer[block]
    buffer = run.residency.images[block] if stays else run.residency.images.pop(block)
    if step.leaves(run.blocks[block]) and not stays:  # one that stays may have changed since its last write
        run.residency.pool.give(buffer)
        return None
    future = write_image(run, op, run.blocks[block].file_name, buffer.view)
    if not stays:
        future.add_done_callback(lambda _: run.residency.pool.give(buffer))
    return future


def write_image(run: Runtime, op: Op, name: str, image: memoryview) -> Future:
    """Write ``image`` as the newest generation of a unit. The returned future is done when it is synced."""
    stored = run.stored[name]
    generation = stored.acquire()
    done: Future = Future()

    def written(future: Future) -> None:
        error = future.exception()
        if error is not None:
            done.set_exception(error)
            return
        before = run.newest.get(name)
        run.newest[name] = StoredBlock(generation, tuple(future.result()))
        if before is not None:
            stored.release(before.generation)
        done.set_result(None)

    stored.write(generation, image, **of(op)).add_done_callback(written)
    return done


def download_resident_grads(run: Runtime, op: Op, step: Step) -> None:
    """Bring the gradients of the prologue and epilogue from a separate device."""
    held = step.resident_grads
    assert held is not None
    (flat,) = run.device.download([held.flat], run.residency.lender("resident gradients"))
    step.resident_grads = Gradients(flat, None, held.touched)
    run.moved[op.lane, op.key.kind] += held.flat.nbytes


def upload_resident(run: Runtime, op: Op, step: Step) -> None:
    """Refresh the resident parameters that a separate device computes with."""
    for member in run.resident.trained:
        source = run.resident.copy_view(run.resident_copy, member)
        run.device.refresh(run.resident_leaves[member.name].data, source)
    run.moved[op.lane, op.key.kind] += run.resident.copy_bytes


def update_resident(run: Runtime, op: Op, step: Step) -> None:
    """Apply the optimizer to the prologue and epilogue, whose leaves on a unified device share the copy."""
    assert step.resident_grads is not None
    if not step.leaves(run.resident):
        image = as_tensor(run.resident_buffer)
        apply(run, step, run.resident, image, step.resident_grads, run.resident_copy)
    run.resident.write_buffers(as_tensor(run.resident_buffer), step.buffers)
    step.resident_grads = None


def store_resident(run: Runtime, op: Op, step: Step) -> Future:
    """Write the resident state image."""
    return write_image(run, op, run.resident.file_name, run.resident_buffer.view)
