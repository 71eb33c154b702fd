"""The zeroth-order step (MeZO): losses with displaced weights tell how far to move the weights.

Weights are first moved by the step before, then displaced both ways. A block's buffer holds one compute copy, displaced
along the direction of the step, and behind it the trained part of another, displaced against it. What never changes is
there once.

What a step leaves for the next one is in ``ZerothOrderState``.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import torch

from ...io.buffers import Buffer
from ...optim import mezo
from ...optim.mezo import Delta, epsilon_of
from ...schedule.mezo_schedule import DISPLACED, STREAMS
from ...schedule.operations import Op
from ..memory.block_states import BlockState, as_tensor
from ..memory.zeroth_order import ZerothOrderState, member_state
from ..runtime import Runtime, Step, of
from . import compute, state_ops


def load_frozen(run: Runtime, op: Op, step: Step) -> Future:
    """Read the frozen part of a compute copy to its place."""
    unit, offset = run.blocks[op.key.block], run.param_offsets[op.key.block]
    buffer, (start, stop) = _copies(run, op.key.block), (unit.trained_copy_bytes, unit.copy_bytes)
    assert run.param_scratch is not None
    return run.param_scratch.read(offset + start, buffer.view[start:stop], **of(op))


def displace(run: Runtime, op: Op, step: Step) -> None:
    """Move a block by the step before, and fill both of its copies."""
    block, residency = op.key.block, run.residency
    unit, image = run.blocks[block], as_tensor(residency.images[block, 0])
    copies = as_tensor(_copies(run, block))
    _moved_and_displaced(run, step, unit, image, copies[: unit.copy_bytes], copies[unit.copy_bytes :])
    if unit.frozen and run.placement.params[block]:
        frozen = slice(unit.trained_copy_bytes, unit.copy_bytes)
        copies[frozen].copy_(as_tensor(residency.copies[block])[frozen])


def displace_resident(run: Runtime, op: Op, step: Step) -> None:
    """Move and displace the prologue and epilogue, like ``displace``."""
    unit, size = run.resident, run.resident.trained_copy_bytes
    buffer = run.residency.pool.take(STREAMS * size, "displaced parameters")
    image, copies = as_tensor(state_ops.resident_image(run)), as_tensor(buffer)
    _zeroth(run).resident = buffer
    _moved_and_displaced(run, step, unit, image, copies[:size], copies[size:])
    if run.device.unified:
        _compute_with(run, copies)


def upload_displaced_resident(run: Runtime, op: Op, step: Step) -> None:
    """Bring both copies of the prologue and epilogue to a separate device."""
    buffer = _zeroth(run).resident
    assert buffer is not None
    (copies,) = run.device.upload([as_tensor(buffer)], partial(_give_resident, run))
    _compute_with(run, copies)
    run.moved[op.lane, op.key.kind] += STREAMS * run.resident.trained_copy_bytes


def measure_slope(run: Runtime, op: Op, step: Step) -> None:
    """Compute from the losses how far this step moves the weights. A loss that is not finite skips the step."""
    zeroth = _zeroth(run)
    assert step.hyper is not None
    zeroth.leaves, zeroth.copies = [], None
    if run.device.unified:
        _give_resident(run)
    plus, minus = step.mean_losses()
    step.delta = Delta.of(plus, minus, step.hyper.groups)  # before ``skipped``, as writes look at both
    compute.check_losses(run, op, step)
    zeroth.owe(step.delta, run.units)
    run.resident.write_buffers(as_tensor(state_ops.resident_image(run)), run.resident.buffer_values())
    step.transient = run.transient.changed()


def catch_up(run: Runtime, op: Op, step: Step) -> None:
    """Move a block by the last step, and derive its compute copy."""
    block = op.key.block
    unit, image = run.blocks[block], as_tensor(run.residency.images[block, 0])
    _zeroth(run).catch_up(unit, image)
    copy = state_ops.UpdatedCopy.of(run, block, unit.tiles[0])
    if copy is not None:
        copy.fill(unit, unit.tiles[0], image)


def catch_up_resident(run: Runtime, op: Op, step: Step) -> None:
    """Move the prologue and epilogue by the last step. On a unified device their leaves share the copy."""
    image, unit = as_tensor(state_ops.resident_image(run)), run.resident
    _zeroth(run).catch_up(unit, image)
    unit.write_copy(unit.tiles[0], image, run.resident_copy, None)


def _zeroth(run: Runtime) -> ZerothOrderState:
    assert run.zeroth is not None
    return run.zeroth


def _copies(run: Runtime, block: int) -> Buffer:
    """Return the buffer of both copies of a block, allocated at the first call."""
    place, unit = (DISPLACED, block, -1), run.blocks[block]
    if place not in run.residency.loaded:
        size = unit.copy_bytes + unit.trained_copy_bytes
        run.residency.loaded[place] = run.residency.pool.take(size, "parameters")
    return run.residency.loaded[place]


def _moved_and_displaced(
    run: Runtime, step: Step, unit: BlockState, image: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor
) -> None:
    """Move a unit by the step before, and fill the trained part of two compute copies with its displaced masters.

    ``plus`` is displaced along the direction of this step, ``minus`` against it.
    """
    assert step.hyper is not None
    _zeroth(run).catch_up(unit, image)
    epsilon = epsilon_of(step.hyper.groups)
    for member in unit.trained:
        targets = [(by, unit.copy_view(copy, member)) for by, copy in ((epsilon, plus), (-epsilon, minus))]
        mezo.displace(*member_state(unit, member.name, image), targets)


def _compute_with(run: Runtime, copies: torch.Tensor) -> None:
    """Create the leaves of the prologue and epilogue for both streams."""
    unit, size = run.resident, run.resident.trained_copy_bytes
    _zeroth(run).copies = copies
    _zeroth(run).leaves = [
        {m.name: run.residency.leaf(unit, m, unit.copy_view(copy, m), None) for m in unit.trained}
        for copy in (copies[:size], copies[size:])
    ]


def _give_resident(run: Runtime) -> None:
    zeroth = _zeroth(run)
    assert zeroth.resident is not None
    run.residency.pool.give(zeroth.resident)
    zeroth.resident = None
