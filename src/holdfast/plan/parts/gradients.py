"""Gradients of parameters: summed on the device, brought to the host, spilled where they may not wait there.

On the host they are those that stay until the end of the backward pass (``kept_grads``) or those whose buffer
goes from block to block (``grads``). Delayed ones stay where block inputs were kept that the backward pass has
used, as far as there are enough of them (``kept_inputs``): such buffers are dead until the next forward pass, so
that delaying takes no memory. Where the device is host memory, they are summed in that buffer.
"""

from __future__ import annotations

from .. import ops
from ..ops import Hold, Key
from .schedule import DEVICE_SLOTS, GRAD_SLOTS, Schedule


def spilled(s: Schedule, block: int) -> bool:
    """Do the block's gradients wait for the end of the backward pass on the SSD?"""
    return s.waits(block) and not s.placement.gradients[block]


def begin(s: Schedule, block: int) -> tuple[Hold, ...]:
    """The buffer in which the first backward computation begins the sum."""
    return _host(s, block) if s.work.unified else _device(s, block)


def download(s: Schedule, block: int, micro_batch: int, after: Key, into: tuple[Hold, ...]) -> Key:
    """Bring the sum so far to the host, ``into`` a buffer unless it has one there."""
    return s.add(
        Key("download_grads", block, micro_batch),
        ops.DOWNLOAD,
        nbytes=s.work.blocks[block].grad_bytes,
        needs=(after,),
        takes=into,
        gives=s.off_device(("device_grads", block)),
    )


def upload(s: Schedule, block: int, micro_batch: int) -> Key:
    """Bring the sum of the micro-batches before ``micro_batch`` back to the device."""
    before: Key = Key("download_grads", block, micro_batch - 1)
    if spilled(s, block):
        before = load(s, block, micro_batch - 1)
    return s.add(
        Key("upload_grads", block, micro_batch),
        ops.UPLOAD,
        nbytes=s.work.blocks[block].grad_bytes,
        needs=(before,),
        takes=() if s.work.unified else _device(s, block),
    )


def host_buffer(s: Schedule, block: int) -> tuple[Hold, ...]:
    """The buffer that a first download fills."""
    return () if s.work.unified else _host(s, block)


def hand_over(s: Schedule, block: int, after: Key, into: tuple[Hold, ...]) -> None:
    """All micro-batches are summed: measure the gradients where they are, if they will be clipped, and bring
    them to where they wait to be consumed. A guess uses them before they go to the SSD."""
    if s.shape.clipping != "none":
        after = s.compute(Key("norm_block", block), needs=(after,))
    done = download(s, block, s.shape.micro_batches - 1, after, into)
    if spilled(s, block) and not s.guesses(block):
        store(s, block, s.shape.micro_batches - 1, done)


def store(s: Schedule, block: int, micro_batch: int, after: Key) -> None:
    """Spill the sum so far to the SSD."""
    s.add(
        Key("store_grads", block, micro_batch),
        ops.SSD_WRITE,
        nbytes=s.work.blocks[block].grad_bytes,
        needs=(after,),
        gives=_names(s, block),
    )


def load(s: Schedule, block: int, micro_batch: int, *after: Key, redo: bool = False) -> Key:
    """Read spilled gradients back, as they were after ``micro_batch``."""
    return s.add(
        Key("load_grads", block, micro_batch),
        ops.SSD_READ,
        nbytes=s.work.blocks[block].grad_bytes,
        needs=(*after, Key("store_grads", block, micro_batch)),
        takes=_host(s, block),
        redo=redo,
    )


def consume(
    s: Schedule, block: int, *after: Key, redo: bool = False
) -> tuple[tuple[Key, ...], tuple[tuple, ...]]:
    """What an update waits for to have the block's gradients, and the buffers that it gives back. Spilled ones are
    read ``after`` what is given."""
    final = s.shape.micro_batches - 1
    ready = (
        load(s, block, final, *after, redo=redo) if spilled(s, block) else Key("download_grads", block, final)
    )
    return (ready,), _names(s, block)


def _host(s: Schedule, block: int) -> tuple[Hold, ...]:
    size = s.work.blocks[block].grad_bytes
    if lent := s.lent(block):
        names = [("kept_inputs", "grads", block, index) for index in range(lent)]
        return tuple(Hold(name, s.work.input_bytes, slots=s.kept_slots) for name in names)
    if s.waits(block) and s.placement.gradients[block]:
        return (Hold(("kept_grads", block), size),)
    return (Hold(("grads", block), size, slots=GRAD_SLOTS),)


def _names(s: Schedule, block: int) -> tuple[tuple, ...]:
    return tuple(hold.name for hold in _host(s, block))


def _device(s: Schedule, block: int) -> tuple[Hold, ...]:
    return s.on_device(("device_grads", block), s.work.blocks[block].grad_bytes, DEVICE_SLOTS)
