"""Parameters: a block's compute copy comes to the device for one pass over the block.

With several ranks each has its shard, on its SSD or host, and the whole copy is gathered for the pass. Where a block's
activations stay for its backward pass, the parameters that they were computed with stay too, because autograd reads
them again.
"""

from __future__ import annotations

from .. import operations
from ..operations import Hold, Key
from ..buffers_in_use import AS_LISTED
from .parts import PARAM_SLOTS, StepBuilder


def load(s: StepBuilder, phase: str, block: int, micro_batch: int = -1) -> tuple[Key, ...]:
    """Bring a compute copy, as the previous step left it, to the device.

    Returns the operation after which the copy is there; empty where it is there already.
    """
    if phase == "backward" and s.kept[block]:
        return ()
    b, on_host = s.work.blocks[block], s.placement.params[block]
    key = Key("upload_params", block, micro_batch, phase)
    name, device_name = _names(s, phase, block, micro_batch)
    slots = AS_LISTED if s.kept[block] and phase == "forward" else PARAM_SLOTS
    taken = s.on_device(device_name, b.param_bytes, slots)
    if on_host and s.work.ranks == 1:
        updated = (Key("update", block),)
        return (s.add(key, operations.UPLOAD, nbytes=b.param_bytes, needs_previous=updated, takes=taken),)
    buffer = Hold(name, b.param_bytes, slots=slots if s.work.unified else PARAM_SLOTS)
    ready: tuple[Key, ...] = ()
    if not on_host:
        read = s.add(
            Key("load_params", block, micro_batch, phase),
            operations.SSD_READ,
            nbytes=b.kept_param_bytes,
            needs_previous=(Key("store_params", block),),
            takes=(buffer,),
        )
        ready = (read,)
    if s.work.ranks > 1:
        gathered = s.add(
            Key("gather_params", block, micro_batch, phase),
            operations.EXCHANGE,
            nbytes=b.param_gather_bytes,
            needs=ready,
            needs_previous=(Key("update", block),) if on_host else (),
            takes=(buffer,) if on_host else (),
        )
        ready = (gathered,)
    given = s.off_device(name)
    return (s.add(key, operations.UPLOAD, nbytes=b.param_bytes, needs=ready, takes=taken, gives=given),)


def release(s: StepBuilder, phase: str, block: int, micro_batch: int = -1) -> tuple[tuple, ...]:
    """Return the buffer that the last computation of the pass gives back."""
    if s.kept[block]:
        if phase == "forward":
            return ()
        if phase == "backward":
            phase = "forward"  # the pass that brought it
    name, device_name = _names(s, phase, block, micro_batch)
    if not s.work.unified:
        return (device_name,)
    stays = s.placement.params[block] and s.work.ranks == 1
    return () if stays else (name,)


def _names(s: StepBuilder, phase: str, block: int, micro_batch: int) -> tuple[tuple, tuple]:
    """Return the names of the buffer on the host and of that on a separate device.

    Buffers that stay for the backward pass have classes of their own.
    """
    place, kept = (phase, block, micro_batch), s.kept[block] and phase == "forward"
    on_host = "kept_params" if kept and s.work.unified else "params"
    return (on_host, *place), ("kept_device_params" if kept else "device_params", *place)
