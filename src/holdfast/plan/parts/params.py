"""Parameters: a block's working copy comes to the device for one pass over the block."""

from __future__ import annotations

from .. import ops
from ..ops import Hold, Key
from .schedule import PARAM_SLOTS, Schedule


def load(s: Schedule, phase: str, block: int, micro_batch: int = -1) -> Key:
    """Bring a working copy, as the previous step left it, to the device; returns the operation after which
    it is there."""
    size, name = s.work.blocks[block].param_bytes, (phase, block, micro_batch)
    key = Key("upload_params", block, micro_batch, phase)
    taken = s.on_device(("device_params", *name), size, PARAM_SLOTS)
    if s.placement.params[block]:
        return s.add(key, ops.UPLOAD, nbytes=size, needs_previous=(Key("update", block),), takes=taken)
    read = s.add(
        Key("load_params", block, micro_batch, phase),
        ops.SSD_READ,
        nbytes=size,
        needs_previous=(Key("store_params", block),),
        takes=(Hold(("params", *name), size, slots=PARAM_SLOTS),),
    )
    given = s.off_device(("params", *name))
    return s.add(key, ops.UPLOAD, nbytes=size, needs=(read,), takes=taken, gives=given)


def release(s: Schedule, phase: str, block: int, micro_batch: int = -1) -> tuple[tuple, ...]:
    """The buffer that the last computation of the pass gives back."""
    if not s.work.unified:
        return (("device_params", phase, block, micro_batch),)
    return () if s.placement.params[block] else (("params", phase, block, micro_batch),)
