"""The horizontal order: each micro-batch through the whole model, as ordinary accumulation does.

It is the baseline: parameters cross 2M times a step and accumulated gradients 2M-1 times. Gradients of all
blocks wait for the last micro-batch, so four bytes per parameter are kept, on the host or on the SSD.
"""

from __future__ import annotations

from . import ops
from .ops import Hold, Key, Op
from .parts import GRAD_SLOTS, Schedule
from .work import Placement, StepShape, Work


def horizontal(work: Work, placement: Placement, shape: StepShape) -> list[Op]:
    """The operations of one training step in the horizontal order."""
    schedule = Schedule(work, placement, shape, keeps_grads=True)
    last = schedule.count - 1
    passes = []
    for m in range(shape.micro_batches):
        passes += [("forward", block, m) for block in range(last)]
        passes += [("backward", block, m) for block in range(last, -1, -1)]
    schedule.load_params(passes[0][1], passes[0][0], 0)
    ready = []
    for index, (phase, block, m) in enumerate(passes):
        if index + 1 < len(passes):
            schedule.load_params(passes[index + 1][1], passes[index + 1][0], passes[index + 1][2])
        if phase == "forward":
            _forward(schedule, block, m, schedule.uploads[index])
        elif (done := _backward(schedule, block, m, schedule.uploads[index])) is not None:
            ready.append(done)
    end = schedule.pass_ends[-1]
    if shape.clip:
        end = schedule.add(Key("norm"), ops.COMPUTE, needs=(*ready, end))
    schedule.update_resident(end)
    for block in range(last + 1):
        schedule.update_block(block, end, *ready)
    schedule.commit()
    return schedule.ops


def _forward(schedule: Schedule, block: int, m: int, uploaded: Key) -> None:
    key = schedule.add(
        Key("forward", block, m),
        ops.COMPUTE,
        work=schedule.work.blocks[block].forward_flop,
        needs=(uploaded,),
        needs_previous=(Key("update_resident"),) if block == 0 and m == 0 else (),
        gives=schedule.release_params(block, "forward", m),
    )
    if block == 0:
        schedule.keep_input(0, m, key)
    if block + 1 < schedule.count - 1:  # the last block's input is used at once, on the device
        schedule.keep_input(block + 1, m, key)
    schedule.store_input(block, m, key)
    schedule.pass_ends.append(key)


def _backward(schedule: Schedule, block: int, m: int, uploaded: Key) -> Key | None:
    """One micro-batch of ``block``; after the last, returns when its gradients may be consumed."""
    work, final = schedule.work, m == schedule.shape.micro_batches - 1
    b, is_last = work.blocks[block], block == schedule.count - 1
    needs, given = (), schedule.release_params(block, "backward", m)
    if not is_last:
        needs, given = (schedule.fetch_input(block, m, "backward"),), (*given, ("input", block, m))
    fetched, taken = _grads_on_device(schedule, block, m)
    key = schedule.add(
        Key("backward", block, m),
        ops.COMPUTE,
        work=3 * b.forward_flop + (work.head_flop if is_last else 0.0),
        needs=(uploaded, *needs, *fetched),
        needs_previous=(Key("update_resident"),) if is_last and block == 0 and m == 0 else (),
        takes=taken,
        gives=given,
    )
    schedule.pass_ends.append(key)
    if final:
        return schedule.hand_over_grads(
            block, schedule.check_losses(key) if is_last else key, host_held=m > 0
        )
    size, grads = b.grad_bytes, ("grads", block)
    key = schedule.add(
        Key("download_grads", block, m),
        ops.DOWNLOAD,
        nbytes=size,
        needs=(key,),
        takes=() if work.unified or m else (Hold(("host", *grads), size),),
        gives=() if work.unified else (grads,),
    )
    if not schedule.placement.gradients[block]:
        schedule.spilled.append(schedule.spill_grads(block, m, key))
    return None


def _grads_on_device(schedule: Schedule, block: int, m: int) -> tuple[tuple[Key, ...], tuple[Hold, ...]]:
    """Bring the sum so far to the device; the first micro-batch starts a new one."""
    work = schedule.work
    size = work.blocks[block].grad_bytes
    on_device = Hold(("grads", block), size, "host" if work.unified else "device")
    if m == 0:
        return (), (on_device,)
    needs: tuple[Key, ...] = (Key("download_grads", block, m - 1),)
    if not schedule.placement.gradients[block]:
        slot_free = schedule.spilled[-GRAD_SLOTS + 1 :][:1] if len(schedule.spilled) >= GRAD_SLOTS else []
        needs = (schedule.unspill_grads(block, m - 1, tuple(slot_free)),)
    key = schedule.add(Key("upload_grads", block, m), ops.UPLOAD, nbytes=size, needs=needs)
    return (key,), () if work.unified else (on_device,)
