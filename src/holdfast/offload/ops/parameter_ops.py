"""The operations on a block's compute copy: to the device for one pass, and back after an update.

With several ranks the whole copy is gathered from their shards for the pass. A copy that is read from the SSD is the
one that the latest update wrote. Run by the executor.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from itertools import cycle

import torch

from ...errors import ChunkCorrupt, ModelNotSupported
from ...quantities import shown
from ...schedule.operations import Op
from ..executor import together
from ..memory.block_states import StateTile, as_tensor
from ..runtime import Runtime, Step, of

BACKWARD = "backward"
"""Name of the pass whose compute copy may stay in host memory until the update."""


def load(run: Runtime, op: Op, step: Step) -> Future:
    """Read this process's part of a compute copy from the SSD into a buffer for the whole copy.

    The compute copy is in the scratch, or in the newest files of the block's state and of its frozen parameters.
    """
    block = op.key.block
    unit = run.blocks[block]
    buffer = run.residency.pool.take(unit.copy_bytes, "parameters")
    run.residency.loaded[op.key.phase, block, op.key.micro_batch] = buffer
    offset, reads = run.param_offsets[block], []
    for at, start, stop in run.scratch_parts(block):
        assert run.param_scratch is not None  # None only if this rank has nothing of any block
        reads.append(run.param_scratch.read(offset + at, buffer.view[start:stop], **of(op)))
    for tile in unit.tiles if run.reads_state(block) else ():
        if tile.copy_bytes:
            high, newest = buffer.view[tile.copy_start :][: tile.copy_bytes], run.newest[tile.name]
            files = run.stored[tile.name]
            reads.append(
                files.read(newest.generation, high, newest.checksums, start=tile.high_start, **of(op))
            )
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
    run.data_parallel.gather_copy(unit, as_tensor(buffer))
    run.moved[op.lane, op.key.kind] += op.nbytes


def gather_resident(run: Runtime, op: Op, step: Step) -> None:
    """Gather the resident compute copy on all ranks, of which each has updated its shard. Collective."""
    run.data_parallel.gather_copy(run.resident, run.resident_copy)
    run.moved[op.lane, op.key.kind] += op.nbytes


@torch.inference_mode(
    False
)  # a tensor of inference has no version counter, by which ``release`` finds changes
def upload(run: Runtime, op: Op, step: Step) -> None:
    """Bring the compute copy to the device, from where it stays on the host or was loaded to."""
    block, place = op.key.block, (op.key.phase, op.key.block, op.key.micro_batch)
    residency = run.residency
    buffer = residency.loaded.get(place) or residency.copies[block]
    copied, is_held = None, op.key.phase == BACKWARD and block in step.held_copies
    if not (run.device.unified or is_held) and residency.loaded.pop(place, None) is not None:
        copied = partial(residency.pool.give, buffer)
    (residency.on_device[place],) = run.device.upload([as_tensor(buffer)], copied)
    run.moved[op.lane, op.key.kind] += buffer.nbytes


def release(run: Runtime, step: Step, phase: str, block: int, micro_batch: int) -> None:
    """Release the parameters of a pass from the device, after its last computation.

    A compute copy that an update needs stays in host memory. Raises ``ModelNotSupported`` if the pass has changed a
    parameter in place.
    """
    place = (phase, block, micro_batch)
    changed = _changed_names(run, step, place)
    leaves = run.residency.leaves.pop(place, ())
    run.residency.samples.pop(place, None)
    run.absent.refuse_leaves(run.blocks[block], leaves)
    run.residency.on_device.pop(place)
    if place in run.residency.loaded and not (phase == BACKWARD and block in step.held_copies):
        run.residency.pool.give(run.residency.loaded.pop(place))
    if changed:
        raise _changed(shown(changed))


def refuse_changes(run: Runtime, step: Step, phase: str, block: int, micro_batch: int) -> None:
    """Raise ``ModelNotSupported`` if a pass, whose parameters stay for the backward pass, has changed one."""
    changed = _changed_names(run, step, (phase, block, micro_batch))
    if changed:
        raise _changed(shown(changed))


def _changed_names(run: Runtime, step: Step, place: tuple[str, int, int]) -> list[str]:
    """Return the names of the parameters that a pass has changed in place.

    Changes through ``.data`` are found in samples. On a separate device these are compared later (``refuse_sampled``).
    """
    residency, block = run.residency, place[1]
    leaves = residency.leaves.get(place, ())
    changed = [m.name for m, leaf in zip(cycle(run.blocks[block].members), leaves) if leaf._version]
    before = residency.samples.get(place)
    if changed or before is None:
        return changed
    samples = residency.samples_of(block)
    after = samples.read(residency.on_device[place])
    if run.device.unified:
        return samples.changed(before, after)
    step.sampled.append((samples, before, after))
    return []


def refuse_sampled(run: Runtime, step: Step) -> None:
    """Raise ``ModelNotSupported`` if a pass so far has changed a parameter on a separate device through ``.data``.

    Waits once for the computations so far.
    """
    compared, step.sampled = step.sampled, []
    if not compared:
        return
    before, after = (torch.cat([values[i] for _, *values in compared]) for i in range(2))
    if bool(run.device.fetch((before != after).any())):
        raise _changed(shown([name for samples, *values in compared for name in samples.changed(*values)]))


def _changed(what: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"the model changed {what} in place as it ran. Out of core that change would be lost, or mixed into the"
        " master: compute with a changed copy instead (weight = self.weight.clamp(-1, 1))."
    )


def complete(run: Runtime, block: int, tile: StateTile, image: memoryview) -> None:
    """Put the compute copy of a tile, which is in host memory, into the image of its state, which was read without it.

    Where the device is host memory, the model has computed with these very bytes. They are then verified as if they had
    been read. Raises ``ModelNotSupported`` if they are not those of the newest file.
    """
    held = run.residency.loaded.get((BACKWARD, block, -1)) or run.residency.copies[block]
    start, stop = tile.cuts
    image[start:stop] = held.view[tile.copy_start :][: tile.copy_bytes]
    if run.device.unified:
        newest = run.newest[tile.name]
        try:
            run.stored[tile.name].verify(newest.generation, image[start:stop], newest.checksums, start)
        except ChunkCorrupt as error:
            names = [key.removesuffix("/param") for key in error.atoms]
            raise _changed(f"one of {shown(names)}") from error


def release_held(run: Runtime, step: Step, block: int) -> None:
    """Release the compute copy that the last update of a block has used."""
    if block in step.held_copies:
        run.residency.pool.give(run.residency.loaded.pop((BACKWARD, block, -1)))


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
