"""The updates of a schedule: optimizer state comes to the host, is stepped, and goes to new files.

The commit publishes the new files. No update starts before all losses are known to be finite.
"""

from __future__ import annotations

from .. import operations
from ..operations import GUESS, Hold, Key
from . import gradient_parts
from .step_builder import REDO_SLOTS, STATE_SLOTS, UPDATED_SLOTS, StepBuilder


def check_losses(s: StepBuilder) -> Key:
    """Add the computation after which all losses are known; a step with a NaN among them is skipped whole."""
    return s.compute(Key("check_losses"))


def end_of_backward(s: StepBuilder) -> Key:
    """Return the last computation of a step.

    With clipping it is the norm of all gradients, which several ranks have summed before.
    """
    reduced: tuple[Key, ...] = ()
    if s.work.ranks > 1:
        reduced = (*(Key("reduce_grads", block) for block in range(s.count)), _reduce_resident(s))
    if s.shape.clipping != "none":
        s.compute(Key("norm"), needs=reduced)
    assert s.computed is not None
    return s.computed


def update_block(s: StepBuilder, block: int, *after: Key) -> None:
    """Update a block after ``after``, once its gradients are there."""
    _update(s, block, after)


def guess_block(s: StepBuilder, block: int) -> None:
    """Update a block at once, as if its gradients were not clipped. They are kept until the norm is known."""
    assert s.shape.commit, "what a guess is undone from is the commit of the step before"
    updated = _update(s, block, phase=GUESS)
    if gradient_parts.spilled(s, block):
        gradient_parts.store(s, block, s.shape.micro_batches - 1, updated)


def redo_block(s: StepBuilder, block: int, end: Key) -> None:
    """After ``end``, where the guess was wrong, update a block again.

    The state of the step before is read once more, updated with what is known now, and written over what the guess has
    written. Operations that need the block wait for these operations.
    """
    b, to_ssd = s.work.blocks[block], not s.placement.params[block]
    image, updated_params = ("redone_state", block), ("updated_params", block)
    guessed = Key("update", block, phase=GUESS)
    load = s.add(
        Key("load_state", block),
        operations.SSD_READ,
        nbytes=b.state_bytes,
        needs=(end, guessed),
        takes=(Hold(image, b.state_bytes, slots=REDO_SLOTS),),
        priority=operations.SOON,
        redo=True,
    )
    ready, used = gradient_parts.consume(s, block, end, redo=True)
    updated = s.add(
        Key("update", block),
        operations.UPDATE,
        work=b.elements,
        needs=(load, *ready, *((Key("store_params", block, phase=GUESS),) if to_ssd else ())),
        takes=(Hold(updated_params, b.trained_param_bytes, slots=UPDATED_SLOTS),) if to_ssd else (),
        gives=used,
        redo=True,
    )
    if to_ssd:
        store_params(s, block, updated, redo=True)
    store_state(s, block, updated, Key("store_state", block, phase=GUESS), gives=(image,), redo=True)


def _update(s: StepBuilder, block: int, after: tuple[Key, ...] = (), phase: str = "") -> Key:
    """Bring a block's state to the host, update it after ``after``, and write it and its compute copy.

    A guess leaves the gradients where they are.
    """
    b, on_host = s.work.blocks[block], s.placement.optimizer[block]
    image, needs, previous = ("state", block), after, (Key("store_state", block),)
    if not on_host:
        load = s.add(
            Key("load_state", block, phase=phase),
            operations.SSD_READ,
            nbytes=b.state_bytes,
            needs_previous=previous,
            takes=(Hold(image, b.state_bytes, slots=STATE_SLOTS),),
            priority=operations.SOON,
        )
        needs, previous = (*needs, load), ()
    if phase == GUESS:
        ready, used = (gradient_parts.summed(s, block),), ()
    else:
        ready, used = gradient_parts.consume(s, block)
    to_ssd = not s.placement.params[block]
    updated_params = Hold(("updated_params", block), b.trained_param_bytes, slots=UPDATED_SLOTS)
    updated = s.add(
        Key("update", block, phase=phase),
        operations.UPDATE,
        work=b.elements,
        needs=(*needs, *ready),
        needs_previous=previous,
        takes=(updated_params,) if to_ssd else (),
        gives=used,
    )
    if to_ssd:
        store_params(s, block, updated, phase)
    if not on_host:
        store_state(s, block, updated, gives=(image,), phase=phase)
    elif s.shape.commit:
        store_state(s, block, updated, phase=phase)
    return updated


def store_params(s: StepBuilder, block: int, updated: Key, phase: str = "", redo: bool = False) -> None:
    """Write a block's compute copy to the SSD."""
    s.add(
        Key("store_params", block, phase=phase),
        operations.SSD_WRITE,
        nbytes=s.work.blocks[block].trained_param_bytes,
        needs=(updated,),
        gives=(("updated_params", block),),
        redo=redo,
    )


def store_state(
    s: StepBuilder,
    block: int,
    *after: Key,
    gives: tuple[tuple, ...] = (),
    phase: str = "",
    redo: bool = False,
) -> None:
    """Write a block's state to a file that no kept commit names: the last commit has freed one.

    With no ``after``, the state is that of the last update.
    """
    s.add(
        Key("store_state", block, phase=phase),
        operations.SSD_WRITE,
        nbytes=s.work.blocks[block].state_bytes,
        needs=after,
        needs_previous=(Key("commit"),) if after else (Key("update", block), Key("commit")),
        gives=gives,
        priority=operations.LATER,
        redo=redo,
    )


def update_resident(s: StepBuilder, *after: Key) -> None:
    """Update the prologue and epilogue after ``after``.

    On a separate device their gradients come from there, and their compute copy goes back.
    """
    work, copy = s.work, ("resident_params",)
    if work.ranks > 1:
        after, grads = (*after, Key("reduce_resident")), (("resident_share",),)
    elif not work.unified:
        after, grads = (*after, _download_resident_grads(s, *after)), (("resident_grads",),)
    else:
        grads = ()
    updated = s.add(
        Key("update_resident"),
        operations.UPDATE,
        work=work.resident_elements,
        needs=after,
        needs_previous=(Key("store_resident"),),
        takes=() if work.unified else (Hold(copy, work.resident_param_bytes, slots=1),),
        gives=grads,
    )
    ready = updated
    if work.ranks > 1:
        ready = s.add(
            Key("gather_resident"), operations.EXCHANGE, nbytes=work.resident_gather_bytes, needs=(updated,)
        )
    if not work.unified:
        s.add(
            Key("upload_resident"),
            operations.UPLOAD,
            nbytes=work.resident_param_bytes,
            needs=(ready,),
            gives=(copy,),
        )
    if s.shape.commit:
        store_resident(s, updated)


def _download_resident_grads(s: StepBuilder, *after: Key) -> Key:
    """Bring the gradients of the prologue and epilogue from a separate device."""
    size = s.work.resident_grad_bytes
    return s.add(
        Key("download_resident_grads"),
        operations.DOWNLOAD,
        nbytes=size,
        needs=after,
        takes=(Hold(("resident_grads",), size, slots=1),),
    )


def _reduce_resident(s: StepBuilder) -> Key:
    """Sum the gradients of the prologue and epilogue over the ranks, once the last computation has added to them."""
    assert s.computed is not None
    work, ready, used = s.work, s.computed, s.off_device(("resident_grads",))
    if not work.unified:
        ready = _download_resident_grads(s, ready)
    return s.add(
        Key("reduce_resident"),
        operations.EXCHANGE,
        nbytes=work.resident_reduce_bytes,
        needs=(ready,),
        takes=(Hold(("resident_share",), work.resident_grad_share_bytes, slots=1),),
        gives=used,
    )


def committed(s: StepBuilder) -> tuple[Key, ...]:
    """Return what a step's last computation needs, so that at most one step is then on its way."""
    return (Key("commit"),) if s.shape.commit else ()


def resident_updated(s: StepBuilder) -> tuple[Key, ...]:
    """Return what a step's first computation needs."""
    if not s.work.unified:
        return (Key("upload_resident"),)
    return (Key("gather_resident" if s.work.ranks > 1 else "update_resident"),)


def store_resident(s: StepBuilder, *after: Key) -> None:
    """Write the state of the prologue and epilogue. With no ``after``, it is that of the last update."""
    s.add(
        Key("store_resident"),
        operations.SSD_WRITE,
        nbytes=s.work.resident_state_bytes,
        needs=after,
        needs_previous=(Key("commit"),) if after else (Key("update_resident"), Key("commit")),
        priority=operations.LATER,
    )


def commit(s: StepBuilder) -> None:
    """Publish the step, if it ends in a commit. State that an earlier step wrote is part of it too."""
    if not s.shape.commit:
        return
    stored = tuple(op.key for op in s.ops if op.key.kind in ("store_state", "store_resident"))
    earlier = [Key("store_state", block) for block in range(s.count)]
    s.add(
        Key("commit"),
        operations.COMMIT,
        needs=stored,
        needs_previous=(Key("commit"), *(key for key in earlier if key not in stored)),
    )
