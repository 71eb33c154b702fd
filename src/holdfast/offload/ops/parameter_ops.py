"""The operations on a block's compute copy: to the device for one pass, and back after an update.

With several ranks the whole copy is gathered from their shards for the pass. A copy that is read from the SSD is the
one that the latest update wrote. Run by the executor.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from ...schedule.operations import Op
from ..executor import together
from ..memory.block_states import as_tensor
from ..runtime import Runtime, Step, of


def load(run: Runtime, op: Op, step: Step) -> Future:
    """Read this process's part of a compute copy from the SSD into a buffer for the whole copy."""
    block = op.key.block
    unit = run.blocks[block]
    buffer = run.residency.pool.take(unit.copy_bytes, "parameters")
    run.residency.loaded[op.key.phase, block, op.key.micro_batch] = buffer
    offset, reads = run.param_offsets[block], []
    for at, start, stop in unit.copy_parts:
        if start < stop:
            assert run.param_scratch is not None  # None only if this rank has nothing of any block
            reads.append(run.param_scratch.read(offset + at, buffer.view[start:stop], **of(op)))
    if unit.computes_with_frozen_file:
        name, newest = unit.frozen_file.name, run.newest[unit.frozen_file.name]
        frozen = buffer.view[unit.trained_copy_bytes : unit.copy_bytes]
        reads.append(run.stored[name].read(newest.generation, frozen, newest.checksums, **of(op)))
    return together(reads)


def gather(run: Runtime, op: Op, step: Step) -> None:
    """Gather a whole compute copy on all ranks, from the shards that each has read or keeps on the host.

    Collective: every rank must call this.
    """
    block, place = op.key.block, (op.key.phase, op.key.block, op.key.micro_batch)
    unit, buffer = run.blocks[block], run.residency.loaded.get(place)
    if buffer is None:
        buffer = run.residency.loaded[place] = run.residency.pool.take(unit.copy_bytes, "parameters")
        share = run.residency.copies[block].view
        for part in unit.copy_parts:
            buffer.view[part.start : part.stop] = share[part.at : part.end]
    run.fellows.gather_copy(unit, as_tensor(buffer))
    run.moved[op.lane, op.key.kind] += op.nbytes


def gather_resident(run: Runtime, op: Op, step: Step) -> None:
    """Gather the resident compute copy on all ranks, of which each has updated its shard. Collective."""
    run.fellows.gather_copy(run.resident, run.resident_copy)
    run.moved[op.lane, op.key.kind] += op.nbytes


def upload(run: Runtime, op: Op, step: Step) -> None:
    """Bring the compute copy to the device, from where it stays on the host or was loaded to."""
    block, place = op.key.block, (op.key.phase, op.key.block, op.key.micro_batch)
    residency = run.residency
    buffer = residency.loaded.get(place) or residency.copies[block]
    copied = None
    if not run.device.unified and residency.loaded.pop(place, None) is not None:
        copied = partial(residency.pool.give, buffer)
    (residency.on_device[place],) = run.device.upload([as_tensor(buffer)], copied)
    run.moved[op.lane, op.key.kind] += buffer.nbytes


def release(run: Runtime, phase: str, block: int, micro_batch: int) -> None:
    """Release the parameters of a pass from the device, after its last computation."""
    place = (phase, block, micro_batch)
    run.absent.refuse_leaves(run.blocks[block], run.residency.leaves.pop(place, ()))
    run.residency.on_device.pop(place)
    if place in run.residency.loaded:
        run.residency.pool.give(run.residency.loaded.pop(place))


def store(run: Runtime, op: Op, step: Step) -> Future | None:
    """Write a tile of an updated compute copy (its trained part) to the SSD."""
    block = op.key.block
    buffer = run.residency.outgoing.pop((block, op.key.tile), None)
    if buffer is None:  # the step was skipped
        return None
    assert run.param_scratch is not None
    offset = run.param_offsets[block] + run.blocks[block].tiles[op.key.tile].copy_start
    future = run.param_scratch.write(offset, buffer.view, **of(op))
    future.add_done_callback(lambda _: run.residency.pool.give(buffer))
    return future
