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
    _norms(run.blocks[op.key.block], run.residency.grads[op.key.block], step)


def norm(run: Runtime, op: Op, step: Step) -> None:
    """The global norm, in the order of the model's parameters, and the factor that clips to it. A norm that
    is not finite skips the step."""
    assert step.resident_grads is not None and step.clip_norm is not None
    _norms(run.resident, step.resident_grads, step)
    ordered = [step.norms[name] for name in run.parameter_order if name in step.norms]
    total = torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.zeros(())
    step.total_norm = float(total)
    if not math.isfinite(step.total_norm):
        if not step.skipped:
            step.skipped, step.reason = True, f"the gradient norm is {step.total_norm}"
        return
    scale = torch.clamp(step.clip_norm / (total + 1e-6), max=1.0)
    step.scale = scale.cpu() if float(scale) != 1.0 else None


def _norms(unit: Unit, held: Gradients, step: Step) -> None:
    for member in unit.trained:
        if member.name in held.touched:
            step.norms[member.name] = torch.linalg.vector_norm(unit.grad_view(held.flat, member))
