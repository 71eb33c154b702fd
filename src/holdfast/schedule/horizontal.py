"""The horizontal order: each micro-batch through the whole model, as ordinary accumulation does.

It is the baseline: parameters cross 2M times a step and accumulated gradients 2M-1 times, for M micro-batches.
Gradients of all blocks wait for the last micro-batch, so four bytes per parameter are kept, on the host or on the SSD.
"""

from __future__ import annotations

from dataclasses import replace

from . import gradient_parts, transfer_parts, update_parts
from .operations import Key, Op
from .step_builder import StepBuilder
from .work import BlockPlacement, StepShape, Work


def horizontal(work: Work, placement: BlockPlacement, shape: StepShape) -> list[Op]:
    """Return the operations of one training step in the horizontal order.

    Every update comes after the norm, so that nothing has to be guessed.
    """
    if shape.clipping == "speculate":
        shape = replace(shape, clipping="defer")
    s = StepBuilder(work=work, placement=placement, shape=shape, keeps_grads=True)
    passes: list[tuple[str, int, int]] = []
    for m in range(shape.micro_batches):
        passes += [("forward", block, m) for block in range(s.last)]
        passes += [("backward", block, m) for block in range(s.last, -1, -1)]
    for (phase, block, m), uploaded in transfer_parts.loaded(s, passes):
        (_forward if phase == "forward" else _backward)(s, block, m, uploaded)
    end = update_parts.end_of_backward(s)
    update_parts.update_resident(s, end)
    for block in range(s.count):  # in the order in which the next step needs them
        update_parts.update_block(s, block, end)
    update_parts.commit(s)
    return s.finish()


def _forward(s: StepBuilder, block: int, m: int, uploaded: tuple[Key, ...]) -> None:
    """Add the forward of one micro-batch of ``block``.

    It has no graph, unless the graph is kept for the backward pass. The last block's input is used at once, on the
    device.
    """
    makes = (*((0,) if block == 0 else ()), *((block + 1,) if block + 1 < s.last else ()))
    key = s.compute(
        Key("forward", block, m),
        needs=uploaded,
        work=s.work.blocks[block].forward_flop,
        needs_previous=update_parts.resident_updated(s) if block == 0 and m == 0 else (),
        takes=(
            *transfer_parts.made(s, makes, m),
            *transfer_parts.activations(s, block, m),
            *(() if block else transfer_parts.enter(s, m)),
        ),
        gives=transfer_parts.release(s, "forward", block, m),
    )
    for made in makes:
        transfer_parts.keep(s, made, m, key)
    transfer_parts.store(s, block, m)


def _backward(s: StepBuilder, block: int, m: int, uploaded: tuple[Key, ...]) -> None:
    """Add the backward of one micro-batch of ``block``, which adds to the sum of those before it."""
    is_last, final = block == s.last, m == s.shape.micro_batches - 1
    needs: tuple[Key, ...] = ()
    works = s.workspace(block, m)
    given = (*transfer_parts.release(s, "backward", block, m), *transfer_parts.used_activations(s, block, m))
    if is_last:
        given = (*given, *transfer_parts.leave(s, m))
    else:
        if not s.kept[block]:
            needs = (transfer_parts.fetch(s, "backward", block, m),)
        given = (*given, *transfer_parts.used(s, "backward", block, m))
    key = s.compute(
        Key("backward", block, m),
        needs=(
            *uploaded,
            *needs,
            *(gradient_parts.upload(s, block, m) if m else ()),
            *gradient_parts.upload_tied(s, block, m),
        ),
        work=s.backward_work(block) + (s.work.head_flop if is_last else 0.0),
        needs_previous=(
            *(update_parts.resident_updated(s) if is_last and block == 0 and m == 0 else ()),
            *(update_parts.committed(s) if block == 0 and final else ()),
            *(() if m else update_parts.states_written(s, block)),
        ),
        takes=(*(() if m else gradient_parts.begin(s, block)), *works),
        gives=(*given, *(hold.name for hold in works)),
    )
    into = () if m else gradient_parts.host_buffer(s, block)
    gradient_parts.download_tied(s, block, m, key, has_buffer=m > 0)
    if final:
        gradient_parts.hand_over(s, block, update_parts.check_losses(s) if is_last else key, into)
        return
    done = gradient_parts.download(s, block, m, key, into)
    if gradient_parts.spilled(s, block):
        gradient_parts.store(s, block, m, done)
