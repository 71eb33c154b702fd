"""The operations on tensors that flow between blocks: outputs that become inputs, and their gradients on the way back.

A block's output is a ``BlockOutput`` until the model's thread has received it. From then until the next block's
backward it is that block's input, a ``Boundary``. The input of block 0 comes from the prologue.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from ...quantities import PAGE
from ...schedule.operations import Op
from ..memory.block_states import as_tensor
from ..memory.transfer_pool import packed_bytes, unpacked
from ..model.boundaries import BlockOutput, Boundary
from ..runtime import Runtime, Step, of


def download(run: Runtime, op: Op, step: Step) -> None:
    """Keep the input of a block on the host.

    The input is the output of the block before, or, for block 0 and where the order turns, an input that the block has
    used already.
    """
    block, batch = op.key.block, step.micro_batches[op.key.micro_batch]
    used = op.needs[0].block == block  # its first need is the computation that made it, or used it
    held: Boundary | BlockOutput = batch.boundaries[block] if used else batch.deliveries[block - 1]
    assert held.device is not None
    stays = run.placement.activations[block] or block == len(run.blocks) - 1
    kept = step.training and (stays or step.kept[block])
    lender = run.residency.lender("kept inputs" if kept else "inputs")
    held.host = run.device.download(held.device, lender)
    if block == 0 or not step.horizontal:
        held.device = None
    _count(run, op, held.host)


def upload(run: Runtime, op: Op, step: Step) -> None:
    """Bring the input of a block back to the device, for its forward or its backward."""
    block, batch = op.key.block, step.micro_batches[op.key.micro_batch]
    held = batch.boundaries.get(block) or batch.deliveries[block - 1]
    assert held.host is not None
    held.device = run.device.upload(held.host)
    _count(run, op, held.device)


def hand_on(run: Runtime, delivery: BlockOutput, boundary: Boundary) -> None:
    """Move the host tensors of ``delivery`` to the boundary of the next block, which the thread has called.

    An input that code between the blocks made is kept as well.
    """
    assert boundary.device is not None
    if delivery.host is not None:
        boundary.host = []
        for source, tensor in zip(boundary.moving.values(), boundary.device, strict=True):
            if source.delivery is delivery:
                boundary.host.append(delivery.host[source.index])
            else:
                boundary.host += run.device.download([tensor], run.residency.lender("inputs"))
                run.moved["download", "between"] += tensor.nbytes
    delivery.host = delivery.device = None


def store(run: Runtime, op: Op, step: Step) -> Future:
    """Write the moving inputs of a block to the SSD."""
    place = (op.key.block, op.key.micro_batch)
    boundary = step.micro_batches[op.key.micro_batch].boundaries[op.key.block]
    assert boundary.host is not None
    buffer, boundary.forms = run.residency.pack_input(boundary.host)
    boundary.host = None
    more = sum(not stays for stays in run.placement.activations[:-1]) * len(step.micro_batches)
    scratch, offset = run.input_scratch.slot(place, buffer.nbytes, more)
    future = scratch.write(offset, buffer.view, **of(op))
    future.add_done_callback(lambda _: run.residency.pool.give(buffer))
    return future


def load(run: Runtime, op: Op, step: Step) -> Future:
    """Read the moving inputs of a block back."""
    place = (op.key.block, op.key.micro_batch)
    boundary = step.micro_batches[op.key.micro_batch].boundaries[op.key.block]
    # an input that needs no gradient moves nothing, and its file is one page of filler
    nbytes = max(packed_bytes(boundary.forms), PAGE)
    if run.device.unified:
        buffer = run.residency.inputs[place] = run.residency.pool.take(nbytes, "block inputs")
        flat, view = as_tensor(buffer), buffer.view
    else:
        flat, view = run.residency.lend(nbytes, "inputs")
    boundary.host = unpacked(flat, boundary.forms)
    scratch, offset = run.input_scratch.slot(place, nbytes)
    future, lent = scratch.read(offset, view, **of(op)), [flat]
    # A page of filler has no tensor that keeps its memory from being lent again while it is read.
    future.add_done_callback(lambda _: lent.clear())
    return future


def used(run: Runtime, block: int, micro_batch: int) -> None:
    """Release the input of a block whose backward is over."""
    buffer = run.residency.inputs.pop((block, micro_batch), None)
    if buffer is not None:
        run.residency.pool.give(buffer)


def download_grad(run: Runtime, op: Op, step: Step) -> None:
    """Keep the gradient of a block's input on the host until the block before it runs backward."""
    lender = run.residency.lender("input gradients")
    _move_grads(run, op, step, lambda grads: run.device.download(grads, lender))


def upload_grad(run: Runtime, op: Op, step: Step) -> None:
    """Bring the gradient of a block's input to the device."""
    _move_grads(run, op, step, run.device.upload)


def _move_grads(
    run: Runtime, op: Op, step: Step, move: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> None:
    delivery = step.micro_batches[op.key.micro_batch].deliveries[op.key.block - 1]
    moved = move([grad for grad in delivery.grads if grad is not None])
    left = iter(moved)
    delivery.grads = [grad if grad is None else next(left) for grad in delivery.grads]
    _count(run, op, moved)


def _count(run: Runtime, op: Op, tensors: list[torch.Tensor]) -> None:
    run.moved[op.lane, op.key.kind] += sum(tensor.nbytes for tensor in tensors)
