"""The operations on gradients of parameters: handed to the host, measured for clipping, spilled where memory is short.

Norms are computed as ``clip_grad_norm_`` does, in the order of the model's parameters. Several ranks add their sums,
and each keeps the shard that it updates with. Run by the executor.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from functools import partial

import torch

from ...schedule.operations import Op
from ..memory.block_states import BlockState, as_tensor
from ..memory.residency import Gradients
from ..runtime import Runtime, Step, of


def download(run: Runtime, op: Op, step: Step) -> None:
    """Hand the accumulated gradients over to the host."""
    block = op.key.block
    held = run.residency.grads[block]
    if not run.device.unified:
        run.residency.grads[block] = _on_host(run, op, held)
    run.moved[op.lane, op.key.kind] += run.blocks[block].grad_bytes


def _on_host(run: Runtime, op: Op, held: Gradients) -> Gradients:
    """Return the gradients that a download brings: in a buffer of their own, or in the space of block inputs."""
    residency = run.residency
    if _in_inputs(op):
        (flat,) = run.device.download([held.flat], residency.lender("kept inputs", from_top=True))
        return Gradients(flat, None, held.touched)
    buffer = held.buffer or residency.pool.take(held.flat.nbytes, "gradients")
    (flat,) = run.device.download([held.flat], lambda _: [as_tensor(buffer)[: held.flat.nbytes]])
    return Gradients(flat, buffer, held.touched)


def _in_inputs(op: Op) -> bool:
    """Return whether the gradients that ``op`` makes lie in the space of block inputs."""
    return any(hold.kind == "kept_inputs" for hold in op.takes)


def upload(run: Runtime, op: Op, step: Step) -> None:
    """Bring the sum so far back to the device (horizontal order)."""
    block = op.key.block
    held = run.residency.grads[block]
    if not run.device.unified:
        (flat,) = run.device.upload([held.flat])
        run.residency.grads[block] = Gradients(flat, held.buffer, held.touched)
    run.moved[op.lane, op.key.kind] += run.blocks[block].grad_bytes


def reduce(run: Runtime, op: Op, step: Step) -> None:
    """Sum a block's gradients over the ranks, and keep this rank's shard, measured if it will be clipped.

    Collective: every rank must call this.
    """
    block, pool = op.key.block, run.residency.pool
    unit, summed = run.blocks[block], run.residency.grads[block]
    buffer = None
    if _in_inputs(op) and not run.device.unified:
        flat, _ = run.residency.lend(unit.share_grad_bytes, "kept inputs", from_top=True)
    else:
        buffer = pool.take(unit.share_grad_bytes, "gradients")
        flat = as_tensor(buffer)
    held = run.data_parallel.reduce(unit, summed, flat[: unit.share_grad_bytes])
    run.residency.grads[block] = Gradients(held.flat, buffer, held.touched)
    assert summed.buffer is not None
    pool.give(summed.buffer)
    _reduced(run, op, step, unit, run.residency.grads[block])


def reduce_resident(run: Runtime, op: Op, step: Step) -> None:
    """Sum the gradients of prologue and epilogue over the ranks, like ``reduce``. Collective."""
    unit, summed = run.resident, step.resident_grads
    assert summed is not None
    step.resident_grads = run.data_parallel.reduce(
        unit, summed, torch.empty(unit.share_grad_bytes, dtype=torch.uint8)
    )
    _reduced(run, op, step, unit, step.resident_grads)


def _reduced(run: Runtime, op: Op, step: Step, unit: BlockState, held: Gradients) -> None:
    run.moved[op.lane, op.key.kind] += op.nbytes
    if step.shape.clipping != "none":
        _measure(run, unit, held, step)


def store(run: Runtime, op: Op, step: Step) -> Future | None:
    """Spill gradients to the SSD; do nothing if this rank has nothing of the block that is trained."""
    block = op.key.block
    held = run.residency.grads.pop(block)
    assert held.buffer is not None
    step.touched[block] = held.touched
    buffer, view = held.buffer, held.buffer.view[: run.blocks[block].share_grad_bytes]
    if not view:
        run.residency.pool.give(buffer)
        return None
    assert run.grad_scratch is not None
    future = run.grad_scratch.write(run.grad_offsets[block], view, **of(op))
    future.add_done_callback(lambda _: run.residency.pool.give(buffer))
    return future


def load(run: Runtime, op: Op, step: Step) -> Future | None:
    """Read spilled gradients back."""
    block = op.key.block
    buffer = run.residency.pool.take(run.blocks[block].share_grad_bytes, "gradients")
    run.residency.grads[block] = Gradients(as_tensor(buffer), buffer, step.touched[block])
    view = buffer.view[: run.blocks[block].share_grad_bytes]
    if not view:
        return None
    assert run.grad_scratch is not None
    return run.grad_scratch.read(run.grad_offsets[block], view, **of(op))


def norm_block(run: Runtime, op: Op, step: Step) -> None:
    """Compute the norm of each of a block's gradients, as ``clip_grad_norm_`` does."""
    unit = run.blocks[op.key.block]
    _measure(run, unit, run.residency.grads[op.key.block], step)


def norm(run: Runtime, op: Op, step: Step) -> None:
    """Compute the global norm, in the order of the model's parameters, and the factor that clips to it.

    A norm that is not finite skips the step. Collective: every rank must call this.
    """
    assert step.resident_grads is not None
    if run.data_parallel.alone:
        _measure(run, run.resident, step.resident_grads, step)
    step.norms = run.data_parallel.joined_norms(run.data_parallel.control, step.norms)
    total = run.device.fetch(_joined(step.norms, run.parameter_order))
    step.total_norm = float(total)
    step.decide_clipping()  # the norms of all units have arrived before this one
    if step.shape.clipping == "per_block" or step.skipped:
        return
    if not math.isfinite(step.total_norm):
        step.skipped, step.reason = True, f"the gradient norm is {step.total_norm}"
    elif step.clip_norm is not None:
        step.scale = _scale(total, step.clip_norm)
    step.redone = step.skipped or step.scale is not None


def _measure(run: Runtime, unit: BlockState, held: Gradients, step: Step) -> None:
    """Compute the norms of a unit's gradients.

    If each unit is clipped by itself, also compute the factor that clips this one.
    """
    norms: dict[str, torch.Tensor] = {}
    for piece in unit.pieces:
        if piece.name in held.touched:
            grad = unit.piece_of_grads(held.flat, piece)
            if step.loss_scale is not None:
                step.loss_scale.reduce(grad)
            order = piece.member.order
            norms[piece.name] = torch.linalg.vector_norm(
                grad if order is None else grad.permute(order).contiguous()
            )
    step.norms |= norms
    if step.shape.clipping != "per_block":
        return
    assert step.clip_norm is not None
    norms = run.data_parallel.joined_norms(run.data_parallel.exchange, norms)
    total = _joined(norms, [member.name for member in unit.trained])
    here = run.device.leave({"": total})[""]  # readable when this operation is over; nothing waits for it now
    bound = step.clip_norm * math.sqrt(run.share(unit))
    step.settle_later(unit, partial(_decide, step, unit.name, here, bound))


def _decide(step: Step, name: str, total: torch.Tensor, bound: float) -> None:
    """Leave the unit ``name`` out if ``total``, its norm, is not finite, or note how to clip it to ``bound``."""
    if not math.isfinite(float(total)):
        step.left_out.add(name)
    elif (scale := _scale(total, bound)) is not None:
        step.scales[name] = scale


def _joined(norms: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    """Return the norm over the gradients of all of ``names`` that have one."""
    found = [norms[name] for name in names if name in norms]
    return torch.linalg.vector_norm(torch.stack(found)) if found else torch.zeros(())


def _scale(total: torch.Tensor, bound: float) -> torch.Tensor | None:
    """Return the factor that scales the norm ``total`` (host memory) down to ``bound``; None if it is not above."""
    scale = torch.clamp(bound / (total + 1e-6), max=1.0)
    return scale if float(scale) != 1.0 else None
