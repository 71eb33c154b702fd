"""The vertical order: all micro-batches of a block, then the next block.

Parameters cross to the device twice a step and gradients once, whatever the number of micro-batches; in exchange the
tensors between blocks travel (GreedySnake's vertical scheduling). The last block is not run in the forward pass: its
forward, the epilogue, the loss and its backward run for one micro-batch before the next, so logits exist once.

``work`` decides in which order micro-batches go through a block, and which blocks are updated beside the next forward
pass. Delayed updates are the last operations of their own step's list; the block that the next step needs first comes
first. So the next step needs no information about them.
"""

from __future__ import annotations

from . import gradient_parts, transfer_parts, update_parts
from .operations import Key, Op
from .step_builder import StepBuilder
from .work import BlockPlacement, StepShape, Work, micro_batches


def vertical(work: Work, placement: BlockPlacement, shape: StepShape) -> list[Op]:
    """Return the operations of one training step in the vertical order."""
    s = StepBuilder(
        work=work,
        placement=placement,
        shape=shape,
        keeps_grads=shape.keeps_grads,
        in_flight=shape.micro_batches,
        block_by_block=True,
    )
    passes = [("forward", block) for block in range(s.last)]
    passes += [("backward", block) for block in range(s.last, -1, -1)]
    for (phase, block), uploaded in transfer_parts.loaded(s, passes):
        if phase == "forward":
            _forward(s, block, phase, uploaded)
            continue
        _backward(s, block, uploaded)
        if s.guesses(block):
            update_parts.guess_block(s, block)
        elif not s.waits(block):
            update_parts.update_block(s, block)
    end = update_parts.end_of_backward(s)
    update_parts.update_resident(s, end)
    for block in filter(s.waits, range(s.count)):  # in the order in which the next step needs them
        if s.guesses(block):
            update_parts.redo_block(s, block, end)
        else:
            update_parts.update_block(s, block, *((end,) if shape.keeps_grads else ()))
    update_parts.commit(s)
    return s.finish()


def forward_only(work: Work, placement: BlockPlacement, shape: StepShape) -> list[Op]:
    """Return the operations of an evaluation: the forward passes, with nothing kept and nothing updated."""
    shape = StepShape(micro_batches=shape.micro_batches)
    s = StepBuilder(
        work=work, placement=placement, shape=shape, in_flight=shape.micro_batches, training=False
    )
    for (phase, block), uploaded in transfer_parts.loaded(
        s, [("evaluate", block) for block in range(s.count)]
    ):
        _forward(s, block, phase, uploaded)
    return s.finish()


def commit_only(work: Work, placement: BlockPlacement) -> list[Op]:
    """Return the operations that commit the present state: what stays in host memory is written."""
    s = StepBuilder(work=work, placement=placement, shape=StepShape(micro_batches=1))
    for block in range(s.count):
        for tile in s.tiles(block) if placement.optimizer[block] else ():
            update_parts.store_state(s, block, tile)
    for tile in range(len(work.resident_tiles) if placement.saving.resident_state else 0):
        update_parts.store_resident(s, tile)
    update_parts.commit(s)
    return s.finish()


def _forward(s: StepBuilder, block: int, phase: str, uploaded: tuple[Key, ...]) -> None:
    """Add the forward of all micro-batches of ``block``.

    They have no graph, unless the graph is kept for the backward pass. An evaluation keeps an input only until it is
    used.
    """
    training, is_last, order = phase == "forward", block == s.last, micro_batches(s.shape, block)
    makes = (*((0,) if training and block == 0 else ()), *(() if is_last else (block + 1,)))
    flop = s.work.blocks[block].forward_flop + (s.work.head_flop / 3 if is_last else 0.0)
    for m in order:
        there = block == 0 or s.input_stays(block, m)
        works = s.workspace(block, m) if is_last else ()  # of this list, only an evaluation runs the head
        key = s.compute(
            Key(phase, block, m),
            needs=uploaded if there else (*uploaded, transfer_parts.fetch(s, phase, block, m)),
            work=flop,
            needs_previous=(
                *(() if block else update_parts.resident_updated(s)),
                *(update_parts.states_written(s, block) if works and m == order[0] else ()),
            ),
            takes=(
                *transfer_parts.made(s, makes, m),
                *transfer_parts.activations(s, block, m),
                *(() if block else transfer_parts.enter(s, m)),
                *works,
            ),
            gives=(
                *(hold.name for hold in works),
                *(() if there else transfer_parts.used(s, phase, block, m)),
                *(transfer_parts.release(s, phase, block) if m == order[-1] else ()),
                *(transfer_parts.leave(s, m) if is_last else ()),
            ),
        )
        if there and block:
            transfer_parts.keep(s, block, m, key)
        for made in makes:
            if not s.input_stays(made, m):
                transfer_parts.keep(s, made, m, key)
        if training:
            transfer_parts.store(s, block, m)


def _backward(s: StepBuilder, block: int, uploaded: tuple[Key, ...]) -> None:
    """Add the backward of all micro-batches of ``block``: recompute (unless kept), backward, accumulate.

    The last block runs forward, epilogue and loss first, and then all losses are known.
    """
    is_last, order = block == s.last, micro_batches(s.shape, block)
    flop = s.backward_work(block) + (s.work.head_flop if is_last else 0.0)
    for m in order:
        needs, given = _fetched(s, block, m)
        works = s.workspace(block, m)
        tied = gradient_parts.upload_tied(s, block, s.shape.micro_batches - 1) if m == order[0] else ()
        key = s.compute(
            Key("backward", block, m),
            needs=(*uploaded, *needs, *tied),
            work=flop,
            needs_previous=(
                *(update_parts.resident_updated(s) if is_last and block == 0 else ()),
                *(update_parts.committed(s) if block == 0 and m == order[-1] else ()),
                *(update_parts.states_written(s, block) if m == order[0] else ()),
            ),
            takes=(
                *(gradient_parts.begin(s, block) if m == order[0] else ()),
                *(transfer_parts.made_grad(s, block, m) if block else ()),
                *works,
            ),
            gives=(
                *given,
                *(hold.name for hold in works),
                *transfer_parts.used_activations(s, block, m),
                *(transfer_parts.release(s, "backward", block) if m == order[-1] else ()),
                *(transfer_parts.leave(s, m) if is_last else ()),
            ),
        )
        if block and not s.grad_stays(block, m):
            transfer_parts.keep_grad(s, block, m, key)
    summed = update_parts.check_losses(s) if is_last else Key("backward", block, order[-1])
    gradient_parts.hand_over(s, block, summed, gradient_parts.host_buffer(s, block))
    gradient_parts.download_tied(s, block, s.shape.micro_batches - 1, summed)


def _fetched(s: StepBuilder, block: int, m: int) -> tuple[tuple[Key, ...], tuple[tuple, ...]]:
    """Return what a backward computation needs, and the buffers that it gives back.

    In a model of one block, the block has the prologue's output on the device.
    """
    needs: tuple[Key, ...] = ()
    given: tuple[tuple, ...] = ()
    if s.count > 1:
        given = transfer_parts.used(s, "backward", block, m)
        if not (s.kept[block] or transfer_parts.used_at_once(s, block, m)):
            needs = (transfer_parts.fetch(s, "backward", block, m),)
    if block < s.last:
        given = (*given, *transfer_parts.used_grad(s, block + 1, m))
        if not s.grad_stays(block + 1, m):
            needs = (*needs, transfer_parts.fetch_grad(s, block + 1, m))
    return needs, given
