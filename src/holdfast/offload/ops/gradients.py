"""Gradients of a block's parameters: handed to the host, measured for clipping, spilled where they may not
wait in memory."""

from __future__ import annotations

import math
from concurrent.futures import Future

import torch

from ...plan.ops import Op
from ..residency import Gradients
from ..runtime import Runtime, Step, of
from ..units import Unit, as_tensor


def download(run: Runtime, op: Op, step: Step) -> None:
    """Hand the accumulated gradients over to the host."""
    block = op.key.block
    held = run.residency.grads[block]
    if not run.device.unified:
        buffer = held.buffer or run.residency.pool.take(held.flat.nbytes, "gradients")
        as_tensor(buffer)[: held.flat.numel()].copy_(held.flat)
        run.residency.grads[block] = Gradients(as_tensor(buffer), buffer, held.touched)
    run.moved[op.lane, op.key.kind] += run.blocks[block].grad_bytes


def upload(run: Runtime, op: Op, step: Step) -> None:
    """Bring the sum so far back to the device (horizontal order)."""
    block = op.key.block
    held = run.residency.grads[block]
    if not run.device.unified:
        run.residency.grads[block] = Gradients(run.device.upload(held.flat), held.buffer, held.touched)
    run.moved[op.lane, op.key.kind] += run.blocks[block].grad_bytes


def store(run: Runtime, op: Op, step: Step) -> Future:
    """Spill gradients to the SSD."""
    block = op.key.block
    held = run.residency.grads.pop(block)
    assert held.buffer is not None and run.grad_scratch is not None
    step.touched[block] = held.touched
    view = held.buffer.view[: run.blocks[block].grad_bytes]  # none, if nothing of the block is trained
    future = run.grad_scratch.write(run.grad_offsets[block], view, **of(op))
    buffer = held.buffer
    future.add_done_callback(lambda _: run.residency.pool.give(buffer))
    return future


def load(run: Runtime, op: Op, step: Step) -> Future:
    """Read spilled gradients back."""
    block = op.key.block
    buffer = run.residency.pool.take(run.blocks[block].grad_bytes, "gradients")
    run.residency.grads[block] = Gradients(as_tensor(buffer), buffer, step.touched[block])
    assert run.grad_scratch is not None
    view = buffer.view[: run.blocks[block].grad_bytes]
    return run.grad_scratch.read(run.grad_offsets[block], view, **of(op))


def norm_block(run: Runtime, op: Op, step: Step) -> None:
    """The norm of each of a block's gradients, as ``clip_grad_norm_`` takes it."""
    unit = run.blocks[op.key.block]
    _measure(run, unit, run.residency.grads[op.key.block], step)


def norm(run: Runtime, op: Op, step: Step) -> None:
    """The global norm, in the order of the model's parameters, and the factor that clips to it. A norm that
    is not finite skips the step."""
    assert step.resident_grads is not None
    _measure(run, run.resident, step.resident_grads, step)
    total = _joined(step, run.parameter_order)
    step.total_norm = float(total)
    if step.shape.clipping == "per_block" or step.skipped:
        return
    if not math.isfinite(step.total_norm):
        step.skipped, step.reason = True, f"the gradient norm is {step.total_norm}"
    elif step.clip_norm is not None:
        step.scale = _scale(total, step.clip_norm)
    step.redone = step.skipped or step.scale is not None


def _measure(run: Runtime, unit: Unit, held: Gradients, step: Step) -> None:
    """Norms of a unit's gradients and, where it is clipped by itself, the factor that does."""
    for member in unit.trained:
        if member.name in held.touched:
            grad = unit.grad_view(held.flat, member)
            if step.loss_scale is not None:
                step.loss_scale.reduce(grad)
            step.norms[member.name] = torch.linalg.vector_norm(grad)
    if step.shape.clipping != "per_block":
        return
    assert step.clip_norm is not None
    total = _joined(step, [member.name for member in unit.trained])
    if not math.isfinite(float(total)):
        step.left_out.add(unit.name)
    elif (scale := _scale(total, step.clip_norm * math.sqrt(run.share(unit)))) is not None:
        step.scales[unit.name] = scale


def _joined(step: Step, names: list[str]) -> torch.Tensor:
    """The norm over the gradients of all of ``names`` that have one."""
    norms = [step.norms[name] for name in names if name in step.norms]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _scale(total: torch.Tensor, bound: float) -> torch.Tensor | None:
    """What brings the norm ``total`` down to ``bound``; None if it is not above it."""
    scale = torch.clamp(bound / (total + 1e-6), max=1.0)
    return scale.cpu() if float(scale) != 1.0 else None
