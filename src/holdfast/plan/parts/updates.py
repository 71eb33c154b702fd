"""Updates: the optimizer's state comes to the host, is stepped with the gradients, and goes to new files,
which the commit publishes. No update starts before all losses are known to be finite."""

from __future__ import annotations

from .. import ops
from ..ops import Hold, Key
from . import gradients
from .schedule import STATE_SLOTS, UPDATED_SLOTS, Schedule


def check_losses(s: Schedule) -> Key:
    """All losses are known: a step with a NaN among them is skipped whole."""
    return s.compute(Key("check_losses"))


def end_of_backward(s: Schedule) -> Key:
    """The last computation of a step: with clipping, the norm of all gradients."""
    if s.shape.clip:
        s.compute(Key("norm"))
    assert s.computed is not None
    return s.computed


def update_block(s: Schedule, block: int, *after: Key) -> None:
    """Update a block after ``after`` and once its gradients are there."""
    b, on_host = s.work.blocks[block], s.placement.optimizer[block]
    image, updated_params = ("state", block), ("updated_params", block)
    needs, previous = after, (Key("store_state", block),)
    if not on_host:
        load = s.add(
            Key("load_state", block),
            ops.SSD_READ,
            nbytes=b.state_bytes,
            needs_previous=previous,
            takes=(Hold(image, b.state_bytes, slots=STATE_SLOTS),),
            priority=ops.SOON,
        )
        needs, previous = (*needs, load), ()
    ready, used = gradients.consume(s, block)
    to_ssd = not s.placement.params[block]
    updated = s.add(
        Key("update", block),
        ops.UPDATE,
        work=b.elements,
        needs=(*needs, *ready),
        needs_previous=previous,
        takes=(Hold(updated_params, b.trained_param_bytes, slots=UPDATED_SLOTS),) if to_ssd else (),
        gives=used,
    )
    if to_ssd:
        s.add(
            Key("store_params", block),
            ops.SSD_WRITE,
            nbytes=b.trained_param_bytes,
            needs=(updated,),
            gives=(updated_params,),
        )
    if not on_host:
        store_state(s, block, updated, gives=(image,))
    elif s.shape.commit:
        store_state(s, block, updated)


def store_state(s: Schedule, block: int, *after: Key, gives: tuple[tuple, ...] = ()) -> None:
    """Write a block's state to a file that no kept commit names: the last commit has freed one. With no
    ``after``, the state is that of the last update."""
    s.add(
        Key("store_state", block),
        ops.SSD_WRITE,
        nbytes=s.work.blocks[block].state_bytes,
        needs=after,
        needs_previous=(Key("commit"),) if after else (Key("update", block), Key("commit")),
        gives=gives,
        priority=ops.LATER,
    )


def update_resident(s: Schedule, *after: Key) -> None:
    """Update the prologue and epilogue after ``after``. On a separate device their gradients come from there,
    and their working copy goes back."""
    work, grads, copy = s.work, ("resident_grads",), ("resident_params",)
    if not work.unified:
        download = s.add(
            Key("download_resident_grads"),
            ops.DOWNLOAD,
            nbytes=work.resident_grad_bytes,
            needs=after,
            takes=(Hold(grads, work.resident_grad_bytes, slots=1),),
        )
        after = (*after, download)
    updated = s.add(
        Key("update_resident"),
        ops.UPDATE,
        work=work.resident_elements,
        needs=after,
        needs_previous=(Key("store_resident"),),
        takes=() if work.unified else (Hold(copy, work.resident_param_bytes, slots=1),),
        gives=s.off_device(grads),
    )
    if not work.unified:
        s.add(
            Key("upload_resident"),
            ops.UPLOAD,
            nbytes=work.resident_param_bytes,
            needs=(updated,),
            gives=(copy,),
        )
    if s.shape.commit:
        store_resident(s, updated)


def committed(s: Schedule) -> tuple[Key, ...]:
    """What a step's last computation waits for, so that at most one step is on its way when it is over."""
    return (Key("commit"),) if s.shape.commit else ()


def resident_updated(s: Schedule) -> tuple[Key, ...]:
    """What a step's first computation waits for."""
    return (Key("update_resident") if s.work.unified else Key("upload_resident"),)


def store_resident(s: Schedule, *after: Key) -> None:
    """Write the state of the prologue and epilogue. With no ``after``, it is that of the last update."""
    s.add(
        Key("store_resident"),
        ops.SSD_WRITE,
        nbytes=s.work.resident_state_bytes,
        needs=after,
        needs_previous=(Key("commit"),) if after else (Key("update_resident"), Key("commit")),
        priority=ops.LATER,
    )


def commit(s: Schedule) -> None:
    """Publish the step, if it ends in a commit. State that an earlier step wrote is part of it too."""
    if not s.shape.commit:
        return
    stored = tuple(op.key for op in s.ops if op.key.kind in ("store_state", "store_resident"))
    earlier = [Key("store_state", block) for block in range(s.count)]
    s.add(
        Key("commit"),
        ops.COMMIT,
        needs=stored,
        needs_previous=(Key("commit"), *(key for key in earlier if key not in stored)),
    )
