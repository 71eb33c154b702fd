"""Parameters: the working copy of a block comes to the device for one pass, and goes back after an update."""

from __future__ import annotations

from concurrent.futures import Future

from ...plan.ops import Op
from ..executor import together
from ..runtime import Runtime, Step, of
from ..units import as_tensor


def load(run: Runtime, op: Op, step: Step) -> Future:
    """Read a working copy from the SSD into a buffer."""
    block = op.key.block
    unit = run.blocks[block]
    buffer = run.residency.pool.take(unit.copy_bytes, "parameters")
    run.residency.loaded[op.key.phase, block, op.key.micro_batch] = buffer
    scratch, offset = run.param_scratch, run.param_offsets[block]
    assert scratch is not None
    return together(
        [scratch.read(offset + start, buffer.view[start:stop], **of(op)) for start, stop in unit.copy_parts]
    )


def upload(run: Runtime, op: Op, step: Step) -> None:
    """Bring the working copy to the device, from where it stays on the host or was loaded to."""
    block, place = op.key.block, (op.key.phase, op.key.block, op.key.micro_batch)
    residency = run.residency
    buffer = residency.loaded.get(place) or residency.copies[block]
    residency.on_device[place] = run.device.upload(as_tensor(buffer))
    run.moved[op.lane, op.key.kind] += buffer.nbytes
    if not run.device.unified and place in residency.loaded:
        residency.pool.give(residency.loaded.pop(place))


def release(run: Runtime, phase: str, block: int, micro_batch: int) -> None:
    """The last computation of a pass is over: its parameters leave the device."""
    place = (phase, block, micro_batch)
    run.residency.leaves.pop(place, None)
    run.residency.on_device.pop(place)
    if place in run.residency.loaded:
        run.residency.pool.give(run.residency.loaded.pop(place))


def store(run: Runtime, op: Op, step: Step) -> Future | None:
    """Write an updated working copy (its trained part) to the SSD."""
    block = op.key.block
    buffer = run.residency.outgoing.pop(block, None)
    if buffer is None:  # the step was skipped
        return None
    assert run.param_scratch is not None
    future = run.param_scratch.write(run.param_offsets[block], buffer.view, **of(op))
    future.add_done_callback(lambda _: run.residency.pool.give(buffer))
    return future
