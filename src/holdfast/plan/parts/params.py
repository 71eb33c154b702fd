"""Parameters: a block's working copy comes to the device for one pass over the block. Of several ranks each has its
share, on its SSD or host, and all of it is gathered for the pass."""

from __future__ import annotations

from .. import ops
from ..ops import Hold, Key
from .schedule import PARAM_SLOTS, Schedule


def load(s: Schedule, phase: str, block: int, micro_batch: int = -1) -> Key:
    """Bring a working copy, as the previous step left it, to the device; returns the operation after which
    it is there."""
    b, name, on_host = s.work.blocks[block], (phase, block, micro_batch), s.placement.params[block]
    key = Key("upload_params", block, micro_batch, phase)
    taken = s.on_device(("device_params", *name), b.param_bytes, PARAM_SLOTS)
    if on_host and s.work.ranks == 1:
        updated = (Key("update", block),)
        return s.add(key, ops.UPLOAD, nbytes=b.param_bytes, needs_previous=updated, takes=taken)
    buffer = Hold(("params", *name), b.param_bytes, slots=PARAM_SLOTS)
    ready: tuple[Key, ...] = ()
    if not on_host:
        read = s.add(
            Key("load_params", block, micro_batch, phase),
            ops.SSD_READ,
            nbytes=b.kept_param_bytes,
            needs_previous=(Key("store_params", block),),
            takes=(buffer,),
        )
        ready = (read,)
    if s.work.ranks > 1:
        gathered = s.add(
            Key("gather_params", block, micro_batch, phase),
            ops.EXCHANGE,
            nbytes=b.param_gather_bytes,
            needs=ready,
            needs_previous=(Key("update", block),) if on_host else (),
            takes=(buffer,) if on_host else (),
        )
        ready = (gathered,)
    given = s.off_device(("params", *name))
    return s.add(key, ops.UPLOAD, nbytes=b.param_bytes, needs=ready, takes=taken, gives=given)


def release(s: Schedule, phase: str, block: int, micro_batch: int = -1) -> tuple[tuple, ...]:
    """The buffer that the last computation of the pass gives back."""
    if not s.work.unified:
        return (("device_params", phase, block, micro_batch),)
    stays = s.placement.params[block] and s.work.ranks == 1
    return () if stays else (("params", phase, block, micro_batch),)
