"""The updates of a schedule: optimizer state comes to the host, is stepped, and goes to new files.

The commit publishes the new files. No update starts before all losses are known to be finite.
"""

from __future__ import annotations

from . import gradient_parts, operations, transfer_parts
from .operations import GUESS, Hold, Key
from .step_builder import REDO_SLOTS, RESIDENT_GRAD_SLOTS, UPDATED_SLOTS, StepBuilder


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
    ready, used = gradient_parts.consume(s, block, end, redo=True)
    to_ssd, updated = s.stores_params(block), ()
    for t, tile in enumerate(s.work.blocks[block].tiles):
        image = ("redone_state", block, t)
        guessed = (Key("store_params", block, phase=GUESS, tile=t),) if to_ssd else ()
        load = s.add(
            Key("load_state", block, tile=t),
            operations.SSD_READ,
            nbytes=tile.state_bytes,
            needs=(end, Key("update", block, phase=GUESS, tile=t)),
            takes=(Hold(image, tile.state_bytes, slots=REDO_SLOTS),),
            priority=operations.SOON,
            redo=True,
        )
        is_last = t == s.tiles(block)[-1]
        done = s.add(
            Key("update", block, tile=t),
            operations.UPDATE,
            work=tile.elements,
            needs=(load, *ready, *guessed, *(updated if is_last else ())),
            takes=_updated_params(s, block, t),
            gives=used if is_last else (),
            redo=True,
        )
        updated = (*updated, done)
        if to_ssd:
            store_params(s, block, t, done, redo=True)
        store_state(
            s, block, t, done, Key("store_state", block, phase=GUESS, tile=t), gives=(image,), redo=True
        )


def _update(s: StepBuilder, block: int, after: tuple[Key, ...] = (), phase: str = "") -> Key:
    """Bring a block's state to the host, update it after ``after``, and write it and its compute copy, tile by tile.

    A guess leaves the gradients where they are. Of masters in parts, the compute copy is read only where it is not in
    host memory. Returns the last update, which is over after all others.
    """
    on_host, to_ssd = s.placement.optimizer[block], s.stores_params(block)
    if phase == GUESS:
        ready, used = (gradient_parts.summed(s, block),), ()
    else:
        ready, used = gradient_parts.consume(s, block)
    updated: tuple[Key, ...] = ()
    for t, tile in enumerate(s.work.blocks[block].tiles):
        image, needs, previous = ("state", block, t), after, (Key("store_state", block, tile=t),)
        if not on_host:
            load = s.add(
                Key("load_state", block, phase=phase, tile=t),
                operations.SSD_READ,
                nbytes=tile.rest_bytes if s.copy_is_in_memory(block) else tile.state_bytes,
                needs_previous=previous,
                takes=(Hold(image, tile.state_bytes, slots=s.state_slots),),
                priority=operations.SOON,
            )
            needs, previous = (*needs, load), ()
        is_last = t == s.tiles(block)[-1]
        done = s.add(
            Key("update", block, phase=phase, tile=t),
            operations.UPDATE,
            work=tile.elements,
            needs=(*needs, *ready, *(updated if is_last else ())),
            needs_previous=previous,
            takes=_updated_params(s, block, t),
            gives=(*used, *transfer_parts.held_copy(s, block)) if is_last else (),
        )
        updated = (*updated, done)
        if to_ssd:
            store_params(s, block, t, done, phase)
        if not on_host:
            store_state(s, block, t, done, gives=(image,), phase=phase)
        elif s.shape.commit:
            store_state(s, block, t, done, phase=phase)
    return updated[-1]


def _updated_params(s: StepBuilder, block: int, tile: int) -> tuple[Hold, ...]:
    """Return the buffer of a tile's updated compute copy on its way to the scratch; empty if it does not go there."""
    if not s.stores_params(block):
        return ()
    nbytes = s.work.blocks[block].tiles[tile].trained_param_bytes
    return (Hold(("updated_params", block, tile), nbytes, slots=UPDATED_SLOTS),)


def store_params(
    s: StepBuilder, block: int, tile: int, updated: Key, phase: str = "", redo: bool = False
) -> None:
    """Write a tile's part of the block's compute copy to the SSD."""
    s.add(
        Key("store_params", block, phase=phase, tile=tile),
        operations.SSD_WRITE,
        nbytes=s.work.blocks[block].tiles[tile].trained_param_bytes,
        needs=(updated,),
        gives=(("updated_params", block, tile),),
        redo=redo,
    )


def store_state(
    s: StepBuilder,
    block: int,
    tile: int,
    *after: Key,
    gives: tuple[tuple, ...] = (),
    phase: str = "",
    redo: bool = False,
) -> None:
    """Write a tile of a block's state to a file that no kept commit names: the last commit has freed one.

    With no ``after``, the state is that of the last update. Where passes read the file, the next pass may wait for it.
    """
    s.add(
        Key("store_state", block, phase=phase, tile=tile),
        operations.SSD_WRITE,
        nbytes=s.work.blocks[block].tiles[tile].state_bytes,
        needs=after,
        needs_previous=(Key("commit"),) if after else (Key("update", block, tile=tile), Key("commit")),
        gives=gives,
        priority=operations.SOON if s.reads_state(block) else operations.LATER,
        redo=redo,
    )


def update_resident(s: StepBuilder, *after: Key) -> None:
    """Update the prologue and epilogue after ``after``, tile by tile.

    On a separate device their gradients come from there, and their compute copy goes back.
    """
    work, copy, tiles = s.work, ("resident_params",), s.work.resident_tiles
    if work.ranks > 1:
        after = (*after, Key("reduce_resident"))
    updated: tuple[Key, ...] = ()
    for t, tile in enumerate(tiles):
        image, needs, previous = ("state", s.count, t), after, (Key("store_resident", tile=t),)
        if not s.placement.saving.resident_state:
            load = s.add(
                Key("load_resident", tile=t),
                operations.SSD_READ,
                nbytes=tile.state_bytes,
                needs_previous=previous,
                takes=(Hold(image, tile.state_bytes, slots=s.state_slots),),
            )
            needs, previous = (*needs, load), ()
        is_first, is_last, grads = t == 0, t == len(tiles) - 1, ()
        if work.ranks > 1:
            grads = (("resident_share",),) if is_last else ()
        elif not work.unified:
            needs = (*needs, _download_resident_grads(s, t, tile.grad_bytes, *after))
            grads = (("resident_grads", t),)
        done = s.add(
            Key("update_resident", tile=t),
            operations.UPDATE,
            work=tile.elements,
            needs=(*needs, *(updated if is_last else ())),
            needs_previous=previous,
            takes=(Hold(copy, work.resident_param_bytes, slots=1),) if is_first and not work.unified else (),
            gives=grads,
        )
        updated = (*updated, done)
        if not s.placement.saving.resident_state:
            store_resident(s, t, done, gives=(image,))
        elif s.shape.commit:
            store_resident(s, t, done)
    ready = updated[-1]
    if work.ranks > 1:
        ready = s.add(
            Key("gather_resident"), operations.EXCHANGE, nbytes=work.resident_gather_bytes, needs=(ready,)
        )
    if not work.unified:
        s.add(
            Key("upload_resident"),
            operations.UPLOAD,
            nbytes=work.resident_trained_param_bytes,
            needs=(ready,),
            gives=(copy,),
        )


def _download_resident_grads(s: StepBuilder, tile: int, nbytes: int, *after: Key) -> Key:
    """Bring the gradients of a part of the prologue and epilogue from a separate device."""
    return s.add(
        Key("download_resident_grads", tile=tile),
        operations.DOWNLOAD,
        nbytes=nbytes,
        needs=after,
        takes=(Hold(("resident_grads", tile), nbytes, slots=RESIDENT_GRAD_SLOTS),),
    )


def _reduce_resident(s: StepBuilder) -> Key:
    """Sum the gradients of the prologue and epilogue over the ranks, once the last computation has added to them."""
    assert s.computed is not None
    work, ready, used = s.work, s.computed, s.off_device(("resident_grads", 0))
    if not work.unified:
        ready = _download_resident_grads(s, 0, work.resident_grad_bytes, ready)
    return s.add(
        Key("reduce_resident"),
        operations.EXCHANGE,
        nbytes=work.resident_reduce_bytes,
        needs=(ready,),
        takes=(Hold(("resident_share",), work.resident_grad_share_bytes, slots=1),),
        gives=used,
    )


def states_written(s: StepBuilder, block: int) -> tuple[Key, ...]:
    """Return what the first computation of a pass over ``block`` needs that takes the place of states.

    Slots bound the buffers of steps of one kind. The previous step may have been of another kind. A state that this
    step has already written needs no wait: this step read it after the previous step had written it.
    """
    if not s.workspace(block, 0):
        return ()
    made = {op.key for op in s.ops}
    keys = [
        Key("store_state", block, phase=phase, tile=tile)
        for block in range(s.count)
        for tile in s.tiles(block)
        for phase in ("", GUESS)
        if not s.placement.optimizer[block]
    ]
    if not s.placement.saving.resident_state:
        keys += [Key("store_resident", tile=tile) for tile in range(len(s.work.resident_tiles))]
    return tuple(key for key in keys if key not in made)


def committed(s: StepBuilder) -> tuple[Key, ...]:
    """Return what a step's last computation needs, so that at most one step is then on its way."""
    return (Key("commit"),) if s.shape.commit else ()


def resident_updated(s: StepBuilder) -> tuple[Key, ...]:
    """Return what a step's first computation needs."""
    if not s.work.unified:
        return (Key("upload_resident"),)
    last = len(s.work.resident_tiles) - 1
    return (Key("gather_resident") if s.work.ranks > 1 else Key("update_resident", tile=last),)


def store_resident(s: StepBuilder, tile: int, *after: Key, gives: tuple[tuple, ...] = ()) -> None:
    """Write a tile of the state of the prologue and epilogue. With no ``after``, it is that of the last update."""
    updated = Key("update_resident", tile=tile)
    s.add(
        Key("store_resident", tile=tile),
        operations.SSD_WRITE,
        nbytes=s.work.resident_tiles[tile].state_bytes,
        needs=after,
        needs_previous=(Key("commit"),) if after else (updated, Key("commit")),
        gives=gives,
        priority=operations.LATER,
    )


def commit(s: StepBuilder) -> None:
    """Publish the step, if it ends in a commit. State that an earlier step wrote is part of it too."""
    if not s.shape.commit:
        return
    stored = dict.fromkeys(op.key for op in s.ops if op.key.kind in ("store_state", "store_resident"))
    earlier = [Key("store_state", block, tile=t) for block in range(s.count) for t in s.tiles(block)]
    earlier += [Key("store_resident", tile=t) for t in range(len(s.work.resident_tiles))]
    s.add(
        Key("commit"),
        operations.COMMIT,
        needs=tuple(stored),
        needs_previous=(Key("commit"), *(key for key in earlier if key not in stored)),
    )
