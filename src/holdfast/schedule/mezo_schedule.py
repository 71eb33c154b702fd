"""The zeroth-order step: forward passes alone, of two streams of micro-batches (ZO2's schedule of MeZO).

The loss is measured with the weights displaced along a direction drawn from a seed, and displaced against it. So each
micro-batch goes through a block twice: first all of them with one copy, then all with the other. How far the weights
move is known when the last block has run. Each block moves when the next step reads it, just before it is displaced
again. A block's state is thus read and written once a step, and nothing else of it is: there are no gradients, no
moments, and nothing is kept for a backward pass. Code that reads weights between steps runs ``catch_up`` first.
"""

from __future__ import annotations

from . import operations, transfer_parts, update_parts
from .operations import Hold, Key, Op
from .step_builder import PARAM_SLOTS, STATE_SLOTS, UPDATED_SLOTS, StepBuilder
from .work import BlockPlacement, StepShape, Work

STREAMS = 2

DISPLACED = "displaced"
"""Kind of a computation with displaced weights, and phase of the operations that bring them."""

MEASURED = Key("measure_slope")
"""Key of the last computation: the losses tell how far the weights move."""


def zeroth(work: Work, placement: BlockPlacement, shape: StepShape) -> list[Op]:
    """Return the operations of one zeroth-order step. Micro-batch ``m`` of the other direction is ``M + m``."""
    count = STREAMS * shape.micro_batches
    s = StepBuilder(
        work=work,
        placement=placement,
        shape=StepShape(micro_batches=count, commit=shape.commit),
        in_flight=count,
        training=False,
    )
    resident = _displace_resident(s)
    there = _displace(s, 0)
    for block in range(s.count):
        uploaded, there = there, _displace(s, block + 1) if block < s.last else there  # one block ahead
        _forward(s, block, *((uploaded,) if block else (uploaded, resident)))
    previous = (Key("store_resident"), *update_parts.committed(s))
    s.compute(MEASURED, needs_previous=previous, gives=(_resident_copies(s)[-1].name,))
    if shape.commit:
        update_parts.store_resident(s, 0, MEASURED)
    update_parts.commit(s)
    return s.finish()


def catch_up(work: Work, placement: BlockPlacement, commit: bool) -> list[Op]:
    """Return the operations that bring all weights to the last step, with their compute copies, which no step needs.

    Nothing may be under way.
    """
    s = StepBuilder(work=work, placement=placement, shape=StepShape(micro_batches=1, commit=commit))
    for block, b in enumerate(work.blocks):
        to_ssd, needs = not placement.params[block], _load_state(s, block)
        moved = s.add(
            Key("catch_up", block),
            operations.UPDATE,
            work=b.elements,
            needs=needs,
            takes=(Hold(("updated_params", block, 0), b.trained_param_bytes, slots=UPDATED_SLOTS),) if to_ssd else (),
        )  # fmt: skip
        if to_ssd:
            update_parts.store_params(s, block, 0, moved)
        _store_state(s, block, moved)
    copy = ("resident_params",)
    moved = s.add(
        Key("catch_up_resident"),
        operations.UPDATE,
        work=work.resident_elements,
        takes=() if work.unified else (Hold(copy, work.resident_param_bytes, slots=1),),
    )
    if not work.unified:
        size = work.resident_param_bytes
        s.add(Key("upload_resident"), operations.UPLOAD, nbytes=size, needs=(moved,), gives=(copy,))
    if commit:
        update_parts.store_resident(s, 0, moved)
    update_parts.commit(s)
    return s.finish()


def _displace_resident(s: StepBuilder) -> Key:
    """Move the prologue and epilogue by the last step, and make both displaced copies of them."""
    host, device = _resident_copies(s)[0], _resident_copies(s)[1:]
    moved = s.add(
        Key("displace_resident"),
        operations.UPDATE,
        work=s.work.resident_elements,
        needs_previous=(MEASURED, Key("store_resident")),
        takes=(host,),
    )
    if not device:
        return moved
    return s.add(
        Key("upload_displaced_resident"),
        operations.UPLOAD,
        nbytes=host.nbytes,
        needs=(moved,),
        takes=device,
        gives=(host.name,),
    )


def _resident_copies(s: StepBuilder) -> tuple[Hold, ...]:
    """Return the buffer of both copies on the host, and that on a separate device."""
    size, name = STREAMS * s.work.resident_trained_param_bytes, "displaced_resident"
    return (Hold((name,), size, slots=1), *s.on_device((f"device_{name}",), size, 1))


def _displace(s: StepBuilder, block: int) -> Key:
    """Bring a block's state, move it by the last step, write it, and displace it.

    Both displaced copies are brought to the device with what never changes. Returns the operation after which they are
    there.
    """
    b, copies = s.work.blocks[block], (DISPLACED, block, -1)
    size, frozen = b.param_bytes + b.trained_param_bytes, b.param_bytes - b.trained_param_bytes
    buffer: tuple[Hold, ...] = (Hold(("params", *copies), size, slots=PARAM_SLOTS),)
    needs = _load_state(s, block, operations.NOW)
    if frozen and not s.placement.params[block]:
        read = s.add(Key("load_frozen", block), operations.SSD_READ, nbytes=frozen, takes=buffer)
        needs, buffer = (*needs, read), ()
    moved = s.add(
        Key("displace", block),
        operations.UPDATE,
        work=b.elements,
        needs=needs,
        needs_previous=(MEASURED, Key("store_state", block)),
        takes=buffer,
    )
    uploaded = s.add(
        Key("upload_params", block, phase=DISPLACED),
        operations.UPLOAD,
        nbytes=size,
        needs=(moved,),
        takes=s.on_device(("device_params", *copies), size, PARAM_SLOTS),
        gives=s.off_device(("params", *copies)),
    )
    _store_state(s, block, moved)
    return uploaded


def _load_state(s: StepBuilder, block: int, priority: int = operations.SOON) -> tuple[Key, ...]:
    """Read a block's state, unless it stays in host memory."""
    if s.placement.optimizer[block]:
        return ()
    size = s.work.blocks[block].state_bytes
    load = s.add(
        Key("load_state", block),
        operations.SSD_READ,
        nbytes=size,
        needs_previous=(Key("store_state", block),),
        takes=(Hold(("state", block, 0), size, slots=STATE_SLOTS),),
        priority=priority,
    )
    return (load,)


def _store_state(s: StepBuilder, block: int, moved: Key) -> None:
    """Write a block's state, unless it stays in host memory and nothing is committed."""
    if not s.placement.optimizer[block]:
        update_parts.store_state(s, block, 0, moved, gives=(("state", block, 0),))
    elif s.shape.commit:
        update_parts.store_state(s, block, 0, moved)


def _forward(s: StepBuilder, block: int, *there: Key) -> None:
    """Add all micro-batches of both streams through ``block``, after the operations ``there``, which bring its
    weights."""
    is_last = block == s.last
    makes = () if is_last else (block + 1,)
    copies = ("params" if s.work.unified else "device_params", DISPLACED, block, -1)
    flop = s.work.blocks[block].forward_flop + (s.work.head_flop / 3 if is_last else 0.0)
    for m in range(s.in_flight):
        key = s.compute(
            Key(DISPLACED, block, m),
            needs=(*there, *((transfer_parts.fetch(s, DISPLACED, block, m),) if block else ())),
            work=flop,
            takes=(*transfer_parts.made(s, makes, m), *(() if block else transfer_parts.enter(s, m))),
            gives=(
                *(transfer_parts.used(s, DISPLACED, block, m) if block else ()),
                *((copies,) if m == s.in_flight - 1 else ()),
                *(transfer_parts.leave(s, m) if is_last else ()),
            ),
        )
        for made in makes:
            transfer_parts.keep(s, made, m, key)
