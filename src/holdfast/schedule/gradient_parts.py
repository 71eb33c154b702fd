"""The transfers of parameters' gradients: summed on the device, brought to the host, spilled where they may not wait.

On the host they stay until the end of the backward pass (``kept_grads``), or their buffer goes from block to block
(``grads``). Delayed ones stay where block inputs were kept that the backward pass has used, if there are enough of them
(``kept_inputs``): such buffers are dead until the next forward pass, so delaying takes no memory. Where the device is
host memory, they are summed in that buffer.

With several ranks each sums over its own micro-batches, in a buffer that goes from block to block (``sums``). Then the
sums are added over the ranks, and only the shard that the rank updates with waits to be consumed.

The sum of the tied block begins in the last block's pass, and waits on the host until the tied block's own pass.
"""

from __future__ import annotations

from . import operations
from .operations import TIED, Hold, Key
from .step_builder import StepBuilder


def spilled(s: StepBuilder, block: int) -> bool:
    """Return whether the block's gradients wait on the SSD for the end of the backward pass."""
    return s.waits(block) and not s.placement.gradients[block]


def begin(s: StepBuilder, block: int) -> tuple[Hold, ...]:
    """Return the buffers in which the first backward computation of a pass over ``block`` begins sums."""
    where = _summing if s.work.unified else _device
    return tuple(hold for each in _begun(s, block) for hold in where(s, each))


def upload(s: StepBuilder, block: int, micro_batch: int) -> tuple[Key, ...]:
    """Bring the sums that ``begin`` began back to the device, as they were before ``micro_batch``."""
    return tuple(_upload_after(s, each, micro_batch) for each in _begun(s, block))


def _begun(s: StepBuilder, block: int) -> tuple[int, ...]:
    """Return the blocks whose sums a pass over ``block`` is the first to add to."""
    return (*(() if block == s.work.tied_block else (block,)), *s.also_used(block))


def download_tied(s: StepBuilder, block: int, micro_batch: int, after: Key, has_buffer: bool = False) -> None:
    """Bring the sum of the tied block to the host, if a pass over ``block``, another one, has added to it."""
    for tied in () if s.work.unified else s.also_used(block):
        download(s, tied, micro_batch, after, () if has_buffer else _summing(s, tied), TIED)


def upload_tied(s: StepBuilder, block: int, micro_batch: int) -> tuple[Key, ...]:
    """Bring the sum back to the device that ``download_tied`` brought to the host, if ``block`` is the tied one."""
    if block != s.work.tied_block or s.work.unified:
        return ()
    downloaded = Key("download_grads", block, micro_batch, TIED)
    return (_upload(s, block, downloaded, Key("upload_grads", block, micro_batch, TIED)),)


def download(
    s: StepBuilder, block: int, micro_batch: int, after: Key, into: tuple[Hold, ...], phase: str = ""
) -> Key:
    """Bring the sum so far to the host, ``into`` a buffer unless it has one there."""
    return s.add(
        Key("download_grads", block, micro_batch, phase),
        operations.DOWNLOAD,
        nbytes=s.work.blocks[block].grad_bytes,
        needs=(after,),
        takes=into,
        gives=tuple(hold.name for hold in _device(s, block)),
    )


def _upload_after(s: StepBuilder, block: int, micro_batch: int) -> Key:
    before: Key = Key("download_grads", block, micro_batch - 1)
    if spilled(s, block):
        before = load(s, block, micro_batch - 1)
    return _upload(s, block, before, Key("upload_grads", block, micro_batch))


def _upload(s: StepBuilder, block: int, before: Key, key: Key) -> Key:
    return s.add(
        key,
        operations.UPLOAD,
        nbytes=s.work.blocks[block].grad_bytes,
        needs=(before,),
        takes=() if s.work.unified else _device(s, block),
    )


def host_buffer(s: StepBuilder, block: int) -> tuple[Hold, ...]:
    """Return the buffer that the first download after a pass over ``block`` fills; the tied block has one by then."""
    return () if s.work.unified or block == s.work.tied_block else _summing(s, block)


def hand_over(s: StepBuilder, block: int, after: Key, into: tuple[Hold, ...]) -> None:
    """Bring the gradients, summed over all micro-batches, to where they wait to be consumed.

    If they will be clipped, they are measured before, where they are. A guess uses them before they go to the SSD.
    """
    if s.shape.clipping != "none" and s.work.ranks == 1:
        after = s.compute(Key("norm_block", block), needs=(after,))
    done = download(s, block, s.shape.micro_batches - 1, after, into)
    if s.work.ranks > 1:
        done = _reduce(s, block, done)
    if spilled(s, block) and not s.guesses(block):
        store(s, block, s.shape.micro_batches - 1, done)


def _reduce(s: StepBuilder, block: int, after: Key) -> Key:
    """Sum over the ranks, so that this rank's shard of the sum remains. It is then measured, if it will be clipped."""
    return s.add(
        Key("reduce_grads", block),
        operations.EXCHANGE,
        nbytes=s.work.blocks[block].grad_reduce_bytes,
        needs=(after,),
        takes=_host(s, block),
        gives=tuple(hold.name for hold in _summing(s, block)),
    )


def summed(s: StepBuilder, block: int) -> Key:
    """Return the operation after which the block's gradients are those of the step."""
    if s.work.ranks > 1:
        return Key("reduce_grads", block)
    return Key("download_grads", block, s.shape.micro_batches - 1)


def store(s: StepBuilder, block: int, micro_batch: int, after: Key) -> None:
    """Spill the sum so far to the SSD."""
    s.add(
        Key("store_grads", block, micro_batch),
        operations.SSD_WRITE,
        nbytes=s.work.blocks[block].kept_grad_bytes,
        needs=(after,),
        gives=_names(s, block),
    )


def load(s: StepBuilder, block: int, micro_batch: int, *after: Key, redo: bool = False) -> Key:
    """Read spilled gradients back, as they were after ``micro_batch``."""
    return s.add(
        Key("load_grads", block, micro_batch),
        operations.SSD_READ,
        nbytes=s.work.blocks[block].kept_grad_bytes,
        needs=(*after, Key("store_grads", block, micro_batch)),
        takes=_host(s, block),
        redo=redo,
    )


def consume(
    s: StepBuilder, block: int, *after: Key, redo: bool = False
) -> tuple[tuple[Key, ...], tuple[tuple, ...]]:
    """Return the operations that an update needs for the block's gradients, and the buffers that it gives back.

    Spilled gradients are read after the operations ``after``.
    """
    final = s.shape.micro_batches - 1
    ready = load(s, block, final, *after, redo=redo) if spilled(s, block) else summed(s, block)
    return (ready,), _names(s, block)


def _summing(s: StepBuilder, block: int) -> tuple[Hold, ...]:
    """Return the host buffer in which the sum over the micro-batches is held."""
    if s.work.ranks == 1:
        return _host(s, block)
    return (_shared_buffer(s, "sums", block, s.work.blocks[block].grad_bytes),)


def _shared_buffer(s: StepBuilder, kind: str, block: int, nbytes: int) -> Hold:
    """Return a buffer that goes from block to block; the tied block has one of its own."""
    if block == s.work.tied_block:
        return Hold((f"tied_{kind}", block), nbytes, slots=1)
    return Hold((kind, block), nbytes, slots=s.placement.saving.grad_slots)


def _host(s: StepBuilder, block: int) -> tuple[Hold, ...]:
    size = s.work.blocks[block].kept_grad_bytes
    if count := s.borrowed_buffers(block):
        names = [("kept_inputs", "grads", block, index) for index in range(count)]
        return tuple(Hold(name, s.work.input_bytes, slots=s.kept_slots) for name in names)
    if s.waits(block) and s.placement.gradients[block]:
        return (Hold(("kept_grads", block), size),)
    return (_shared_buffer(s, "grads", block, size),)


def _names(s: StepBuilder, block: int) -> tuple[tuple, ...]:
    return tuple(hold.name for hold in _host(s, block))


def _device(s: StepBuilder, block: int) -> tuple[Hold, ...]:
    name, nbytes, _, slots = _shared_buffer(s, "device_grads", block, s.work.blocks[block].grad_bytes)
    return s.on_device(name, nbytes, slots)
