"""The operations on master parameters and optimizer state: brought to the host, updated, and written to a new file.

Each is about one tile of a unit's state. The file that a step writes is named by no commit until the step's own is
published, so the state before the update stays whole. Run by the executor, on the threads of their lanes.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from ...io.buffers import Buffer
from ...schedule.operations import GUESS, Op
from ..memory.block_states import BlockState, as_tensor
from ..memory.residency import Gradients
from ..memory.unit_files import StateTile
from ..runtime import Runtime, Step, StoredBlock, of
from . import parameter_ops


def load(run: Runtime, op: Op, step: Step) -> Future:
    """Read a state image of a block from its newest file, and verify every byte."""
    return _load(run, op, op.key.block)


def load_resident(run: Runtime, op: Op, step: Step) -> Future:
    """Read a state image of what lies outside the blocks."""
    return _load(run, op, len(run.blocks))


def _load(run: Runtime, op: Op, unit: int) -> Future:
    tile = run.units[unit].tiles[op.key.tile]
    buffer = run.residency.pool.take(tile.layout.file_bytes, "optimizer state")
    run.residency.images[unit, tile.index] = buffer
    newest, start = run.newest[tile.name], tile.layout.file_bytes - op.nbytes
    if start:  # the compute copy, a part of the masters, is in host memory
        run.residency.lack_copy.add((unit, tile.index))
    return run.stored[tile.name].read(
        newest.generation, buffer.view[start:], newest.checksums, start=start, **of(op)
    )


def update(run: Runtime, op: Op, step: Step) -> None:
    """Apply the optimizer to a tile of a block: to its state image in place, and to its compute copy.

    A guess keeps the gradients.
    """
    block, guess = op.key.block, op.key.phase == GUESS
    unit = run.blocks[block]
    tile = unit.tiles[op.key.tile]
    if guess:
        step.before[block, tile.index] = run.newest[tile.name]
    lacks_copy = (block, tile.index) in run.residency.lack_copy
    run.residency.lack_copy.discard((block, tile.index))
    if not step.leaves(unit):
        image = as_tensor(run.residency.images[block, tile.index])
        if lacks_copy:
            parameter_ops.complete(run, block, tile, run.residency.images[block, tile.index].view)
        copy = UpdatedCopy.of(run, block, tile)
        apply(run, step, unit, tile, image, run.residency.grads[block], copy, guess)
    if is_last(unit, tile):
        parameter_ops.release_held(run, step, block)
        if not guess:
            run.residency.free_grads(block, in_inputs=any(name[0] == "kept_inputs" for name in op.gives))


def is_last(unit: BlockState, tile: StateTile) -> bool:
    """Return whether the update of ``tile`` is the last of ``unit``, after which its gradients are not needed."""
    return tile.index == len(unit.tiles) - 1


class UpdatedCopy:
    """The memory for a part of a compute copy that an update writes.

    ``start`` is the offset of ``memory`` in this rank's shard; None if ``memory`` is a whole copy.
    """

    def __init__(self, memory: torch.Tensor, start: int | None) -> None:
        self.memory, self.start = memory, start

    @classmethod
    def of(cls, run: Runtime, block: int, tile: StateTile) -> UpdatedCopy | None:
        """Return the place of a tile's updated copy; None if this rank has no trained part of it outside of its state.

        It is where the copy stays, or a buffer on its way to the SSD.
        """
        if run.placement.params[block]:
            return cls(as_tensor(run.residency.copies[block]), 0)
        if run.reads_state(block) or not tile.copy_bytes:
            return None
        buffer = run.residency.pool.take(tile.copy_bytes, "updated parameters")
        run.residency.outgoing[block, tile.index] = buffer
        return cls(as_tensor(buffer), tile.copy_start)

    def fill(self, unit: BlockState, tile: StateTile, image: torch.Tensor) -> None:
        """Derive the copy from a state image."""
        unit.write_copy(tile, image, self.memory, self.start)


def apply(
    run: Runtime,
    step: Step,
    unit: BlockState,
    tile: StateTile,
    image: torch.Tensor,
    grads: Gradients,
    copy: UpdatedCopy | None,
    guess: bool = False,
) -> None:
    """Do one optimizer step of every parameter that has a gradient. A guess uses the gradients unclipped."""
    assert step.hyper is not None
    scale = None if guess else step.factor(unit)
    for piece in tile.pieces:
        there = None if copy is None else unit.piece_of_copy(copy.memory, piece, copy.start)
        grad = unit.piece_of_grads(grads.flat, piece, grads.start)
        state = unit.parameter_state(tile, piece, image, grad, there)
        if piece.name in grads.touched:
            run.optimizer.update(state, step.hyper, scale, keep_grad=guess)
        else:
            state.write_copy()


def store(run: Runtime, op: Op, step: Step) -> Future | None:
    """Write an updated state image to a file that no kept commit names, and sync it."""
    unit = run.blocks[op.key.block]
    return _store(run, op, op.key.block, changed=not step.leaves(unit))


def _store(run: Runtime, op: Op, unit: int, changed: bool) -> Future | None:
    """Write the state image of a tile, unless it was read in this step and has not ``changed``."""
    tile, stays = run.units[unit].tiles[op.key.tile], run.state_stays(unit)
    place, pool = (unit, tile.index), run.residency.pool
    buffer = run.residency.images[place] if stays else run.residency.images.pop(place)
    if not changed and not stays:  # one that stays may have changed since its last write
        pool.give(buffer)
        return None
    future = write_image(run, op, tile.name, buffer.view)
    if not stays:
        future.add_done_callback(lambda _: pool.give(buffer))
    return future


def write_image(run: Runtime, op: Op, name: str, image: memoryview) -> Future:
    """Write ``image`` as the newest generation of a file. The returned future is done when it is synced."""
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


def resident_image(run: Runtime, tile: int = 0) -> Buffer:
    """Return the image of a tile of the resident state, where it is in host memory at present."""
    return run.residency.images[len(run.blocks), tile]


def download_resident_grads(run: Runtime, op: Op, step: Step) -> None:
    """Bring the gradients of a tile of prologue and epilogue from a separate device; of several ranks, all of them."""
    held, alone = step.resident_grads, run.data_parallel.alone
    assert held is not None
    start, stop = run.resident.tile_grads[op.key.tile] if alone else (0, held.flat.nbytes)
    (flat,) = run.device.download([held.flat[start:stop]], run.residency.lender("resident gradients"))
    found = Gradients(flat, None, held.touched, start)
    if alone:
        step.downloaded[op.key.tile] = found
    else:
        step.resident_grads = found
    run.moved[op.lane, op.key.kind] += stop - start


def upload_resident(run: Runtime, op: Op, step: Step) -> None:
    """Refresh the resident parameters that a separate device computes with."""
    for member in run.resident.trained:
        source = run.resident.copy_view(run.resident_copy, member)
        run.device.refresh(run.resident_leaves[member.name].data, source)
    run.moved[op.lane, op.key.kind] += run.resident.trained_copy_bytes


def update_resident(run: Runtime, op: Op, step: Step) -> None:
    """Apply the optimizer to a tile of prologue and epilogue, whose leaves on a unified device share the copy."""
    unit, tile = run.resident, run.resident.tiles[op.key.tile]
    image = as_tensor(resident_image(run, tile.index))
    grads = step.downloaded.pop(tile.index, step.resident_grads)
    assert grads is not None
    if not step.leaves(unit):
        apply(run, step, unit, tile, image, grads, UpdatedCopy(run.resident_copy, None))
    if tile.index == 0:
        unit.write_buffers(image, step.buffers)
    if is_last(unit, tile):
        step.resident_grads = None


def store_resident(run: Runtime, op: Op, step: Step) -> Future | None:
    """Write a resident state image. Its first tile holds buffers, which a step that leaves the unit may change."""
    return _store(run, op, len(run.blocks), changed=op.key.tile == 0 or not step.leaves(run.resident))
