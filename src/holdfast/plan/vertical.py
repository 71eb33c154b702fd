"""The vertical order: all micro-batches of a block, then the next block.

Parameters cross to the device twice a step and gradients once, whatever the number of micro-batches; in
exchange the tensors between blocks travel (GreedySnake's vertical scheduling). The last block is not run in
the forward pass: its forward, the epilogue, the loss and its backward run for one micro-batch before the
next, so logits exist once.

Micro-batches go in ascending order everywhere, which adds gradients in the order of the ordinary
accumulation loop (``order="plain"``).
"""

from __future__ import annotations

from . import ops
from .ops import Hold, Key, Op
from .parts import GRAD_SLOTS, Schedule
from .work import Placement, StepShape, Work


def vertical(work: Work, placement: Placement, shape: StepShape) -> list[Op]:
    """The operations of one training step in the vertical order."""
    schedule = Schedule(work, placement, shape, keeps_grads=shape.clip)
    last = schedule.count - 1
    passes = [("forward", block) for block in range(last)]
    passes += [("backward", block) for block in range(last, -1, -1)]
    schedule.load_params(passes[0][1], passes[0][0])
    ready = []
    for index, (phase, block) in enumerate(passes):
        if index + 1 < len(passes):  # one pass ahead
            schedule.load_params(passes[index + 1][1], passes[index + 1][0])
        if phase == "forward":
            _forward(schedule, block, phase, schedule.uploads[index])
            continue
        done = _backward(schedule, block, schedule.uploads[index])
        if shape.clip:
            ready.append(done)
        else:
            schedule.update_block(block, done)
    if shape.clip:
        ready = [schedule.add(Key("norm"), ops.COMPUTE, needs=(*ready, schedule.pass_ends[-1]))]
        schedule.update_resident(*ready)
        for block in range(last + 1):
            schedule.update_block(block, *ready)
    else:
        schedule.update_resident(schedule.pass_ends[-1])
    schedule.commit()
    return schedule.ops


def forward_only(work: Work, placement: Placement, shape: StepShape) -> list[Op]:
    """The operations of an evaluation: the forward passes, with nothing kept and nothing updated."""
    schedule = Schedule(work, placement, shape, keeps_grads=False)
    schedule.load_params(0, "evaluate")
    for block in range(schedule.count):
        if block + 1 < schedule.count:
            schedule.load_params(block + 1, "evaluate")
        _forward(schedule, block, "evaluate", schedule.uploads[block])
    return schedule.ops


def commit_only(work: Work, placement: Placement) -> list[Op]:
    """The operations that make the present state a commit: what stays in host memory is written."""
    schedule = Schedule(work, placement, StepShape(micro_batches=1), keeps_grads=False)
    for block in range(schedule.count):
        if placement.optimizer[block]:
            schedule.store_state(block)
    schedule.store_resident()
    schedule.commit()
    return schedule.ops


def _forward(schedule: Schedule, block: int, phase: str, uploaded: Key) -> None:
    """All micro-batches of ``block`` without a graph. An evaluation keeps an input only until it is used."""
    work, count = schedule.work, schedule.shape.micro_batches
    is_last, training = block == schedule.count - 1, phase == "forward"
    for m in range(count):
        needs: tuple[Key, ...] = (uploaded,)
        if block:
            needs += (schedule.fetch_input(block, m, phase),)
        given = schedule.release_params(block, phase) if m == count - 1 else ()
        if block and not training:
            given += (("input", block, m),)
        key = schedule.add(
            Key(phase, block, m),
            ops.COMPUTE,
            work=work.blocks[block].forward_flop + (work.head_flop / 3 if is_last else 0.0),
            needs=needs,
            needs_previous=() if block else (Key("update_resident"),),
            gives=given,
        )
        if training and block == 0:
            schedule.keep_input(0, m, key)
        if not is_last:
            schedule.keep_input(block + 1, m, key)
        if training:
            schedule.store_input(block, m, key)
    schedule.pass_ends.append(key)


def _backward(schedule: Schedule, block: int, uploaded: Key) -> Key:
    """All micro-batches of ``block``: recompute, backward, accumulate. Returns when its gradients may be
    consumed. The last block runs forward, epilogue and loss first, and then all losses are known."""
    work, shape = schedule.work, schedule.shape
    b, is_last = work.blocks[block], block == schedule.count - 1
    grads = Hold(("grads", block), b.grad_bytes, "host" if work.unified else "device")
    for m in range(shape.micro_batches):
        needs, given = schedule.backward_inputs(block, m)
        if m == shape.micro_batches - 1:
            given += schedule.release_params(block, "backward")
        if m == 0 and not schedule.keeps_grads and len(schedule.updated) >= GRAD_SLOTS:
            needs += (schedule.updated[-GRAD_SLOTS],)
        key = schedule.add(
            Key("backward", block, m),
            ops.COMPUTE,
            work=3 * b.forward_flop + (work.head_flop if is_last else 0.0),
            needs=(uploaded, *needs),
            needs_previous=(Key("update_resident"),) if is_last and block == 0 else (),
            takes=(grads,) if m == 0 else (),
            gives=given,
        )
        if block:
            schedule.keep_input_grad(block, m, key)
    schedule.pass_ends.append(key)
    if is_last:
        key = schedule.check_losses(key)
    return schedule.hand_over_grads(block, key)
