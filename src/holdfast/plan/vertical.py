"""The vertical order: all micro-batches of a block, then the next block.

Parameters cross to the device twice a step and gradients once, whatever the number of micro-batches; in
exchange the tensors between blocks travel (GreedySnake's vertical scheduling). The last block is not run in
the forward pass: its forward, the epilogue, the loss and its backward run for one micro-batch before the
next, so logits exist once.

Micro-batches go in ascending order everywhere, which adds gradients in the order of the ordinary
accumulation loop (``order="plain"``).
"""

from __future__ import annotations

from .ops import Key, Op
from .parts import gradients, inputs, params, updates
from .parts.schedule import Schedule
from .work import Placement, StepShape, Work


def vertical(work: Work, placement: Placement, shape: StepShape) -> list[Op]:
    """The operations of one training step in the vertical order."""
    s = Schedule(
        work=work,
        placement=placement,
        shape=shape,
        keeps_grads=shape.clip,
        in_flight=shape.micro_batches,
        keeps_last_input=True,
    )
    passes = [("forward", block) for block in range(s.last)]
    passes += [("backward", block) for block in range(s.last, -1, -1)]
    there = params.load(s, *passes[0])
    for (phase, block), following in zip(passes, [*passes[1:], None]):
        uploaded, there = there, params.load(s, *following) if following else there  # one pass ahead
        if phase == "forward":
            _forward(s, block, phase, uploaded)
            continue
        _backward(s, block, uploaded)
        if not shape.clip:
            updates.update_block(s, block)
    end = updates.end_of_backward(s)
    updates.update_resident(s, end)
    for block in range(s.count if shape.clip else 0):  # in the order in which the next step wants them
        updates.update_block(s, block, end)
    updates.commit(s)
    return s.finish()


def forward_only(work: Work, placement: Placement, shape: StepShape) -> list[Op]:
    """The operations of an evaluation: the forward passes, with nothing kept and nothing updated."""
    s = Schedule(work=work, placement=placement, shape=shape, in_flight=shape.micro_batches, training=False)
    there = params.load(s, "evaluate", 0)
    for block in range(s.count):
        uploaded, there = there, params.load(s, "evaluate", block + 1) if block < s.last else there
        _forward(s, block, "evaluate", uploaded)
    return s.finish()


def commit_only(work: Work, placement: Placement) -> list[Op]:
    """The operations that make the present state a commit: what stays in host memory is written."""
    s = Schedule(work=work, placement=placement, shape=StepShape(micro_batches=1))
    for block in range(s.count):
        if placement.optimizer[block]:
            updates.store_state(s, block)
    updates.store_resident(s)
    updates.commit(s)
    return s.finish()


def _forward(s: Schedule, block: int, phase: str, uploaded: Key) -> None:
    """All micro-batches of ``block`` without a graph. An evaluation keeps an input only until it is used."""
    training, is_last, final = phase == "forward", block == s.last, s.shape.micro_batches - 1
    makes = (*((0,) if training and block == 0 else ()), *(() if is_last else (block + 1,)))
    flop = s.work.blocks[block].forward_flop + (s.work.head_flop / 3 if is_last else 0.0)
    for m in range(s.shape.micro_batches):
        key = s.compute(
            Key(phase, block, m),
            needs=(uploaded, inputs.fetch(s, phase, block, m)) if block else (uploaded,),
            work=flop,
            needs_previous=() if block else updates.resident_updated(s),
            takes=(*inputs.made(s, makes, m), *(() if block else inputs.enter(s, m))),
            gives=(
                *(inputs.used(s, phase, block, m) if block else ()),
                *(params.release(s, phase, block) if m == final else ()),
                *(inputs.leave(s, m) if is_last else ()),
            ),
        )
        for made in makes:
            inputs.keep(s, made, m, key)
        if training:
            inputs.store(s, block, m)


def _backward(s: Schedule, block: int, uploaded: Key) -> None:
    """All micro-batches of ``block``: recompute, backward, accumulate. The last block runs forward, epilogue
    and loss first, and then all losses are known."""
    is_last, final = block == s.last, s.shape.micro_batches - 1
    flop = 3 * s.work.blocks[block].forward_flop + (s.work.head_flop if is_last else 0.0)
    for m in range(s.shape.micro_batches):
        needs, given = _fetched(s, block, m)
        key = s.compute(
            Key("backward", block, m),
            needs=(uploaded, *needs),
            work=flop,
            needs_previous=(
                *(updates.resident_updated(s) if is_last and block == 0 else ()),
                *(updates.committed(s) if block == 0 and m == final else ()),
            ),
            takes=(
                *(gradients.begin(s, block) if m == 0 else ()),
                *(inputs.made_grad(s, block, m) if block else ()),
            ),
            gives=(
                *given,
                *(params.release(s, "backward", block) if m == final else ()),
                *(inputs.leave(s, m) if is_last else ()),
            ),
        )
        if block:
            inputs.keep_grad(s, block, m, key)
    summed = updates.check_losses(s) if is_last else Key("backward", block, final)
    gradients.hand_over(s, block, summed, gradients.host_buffer(s, block))


def _fetched(s: Schedule, block: int, m: int) -> tuple[tuple[Key, ...], tuple[tuple, ...]]:
    """What a backward computation waits for, and what it uses up. The only block of a model of one has the
    prologue's output on the device."""
    needs: tuple[Key, ...] = ()
    given: tuple[tuple, ...] = ()
    if s.count > 1:
        needs, given = (inputs.fetch(s, "backward", block, m),), inputs.used(s, "backward", block, m)
    if block < s.last:
        needs = (*needs, inputs.fetch_grad(s, block + 1, m))
        given = (*given, *inputs.used_grad(s, block + 1, m))
    return needs, given
