"""The transfers of a block's inputs, their gradients and its parameters, to the device and back.

A computation makes a block's input; it goes to the host and comes back for the next computation. In host memory an
input is one that stays (``kept_inputs``) or one of a row that goes to the SSD (``inputs``) once the forward pass has
used it. In the snake order the last micro-batch of a block is the first of the next, so its input goes to the host only
to be kept, and its gradient never leaves the device. A compute copy comes to the device for one pass over the block;
several ranks gather it from their shards. Where activations stay for the backward pass, the parameters stay too,
because autograd reads them again. The last block's pass brings the tied block's copy too. Called by the schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from . import operations
from .operations import GUESS, TIED, Hold, Key, Op
from .step_builder import (
    AS_LISTED,
    DEVICE_SLOTS,
    INPUT_SLOTS,
    PARAM_SLOTS,
    StepBuilder,
    device_input_slots,
)


def on_ssd(s: StepBuilder, block: int) -> bool:
    """Return whether the input of ``block`` goes to the SSD.

    The last block's never does, because it is used at once. Neither does that of a block whose activations stay.
    """
    return s.training and block < s.last and not (s.placement.activations[block] or s.kept[block])


def made(s: StepBuilder, blocks: tuple[int, ...], micro_batch: int) -> tuple[Hold, ...]:
    """Return the buffers that a computation fills with the inputs of ``blocks``."""
    held: tuple[Hold, ...] = ()
    for block in blocks:
        if s.work.unified or not used_at_once(s, block, micro_batch):
            held += (_held(s, block, micro_batch),)
        held += s.on_device(("device_outputs", block, micro_batch), s.work.input_bytes, s.output_slots)
    return held


def used_at_once(s: StepBuilder, block: int, micro_batch: int) -> bool:
    """Return whether the input of ``block`` is on the device when its only computation needs it."""
    return s.training and block == s.last and s.input_stays(block, micro_batch)


def keep(s: StepBuilder, block: int, micro_batch: int, made_by: Key) -> None:
    """Bring the input of ``block`` to the host, once ``made_by`` has made or used it."""
    s.add(
        Key("download_input", block, micro_batch),
        operations.DOWNLOAD,
        nbytes=s.work.input_bytes,
        needs=(made_by,),
        gives=s.off_device(("device_outputs", block, micro_batch)),
    )


def store(s: StepBuilder, block: int, micro_batch: int) -> None:
    """Send a kept input to the SSD, if it goes there, once its forward pass has used it."""
    if not on_ssd(s, block):
        return
    size, staged = s.work.input_bytes, ("staged_inputs", block, micro_batch)
    s.add(
        Key("store_input", block, micro_batch),
        operations.SSD_WRITE,
        nbytes=size,
        needs=(Key("forward", block, micro_batch), Key("download_input", block, micro_batch)),
        takes=(Hold(staged, size, slots=INPUT_SLOTS),),
        gives=(staged, ("inputs", block, micro_batch)),
    )


def fetch(s: StepBuilder, phase: str, block: int, micro_batch: int) -> Key:
    """Bring a kept input back to the device."""
    size = s.work.input_bytes
    needs: tuple[Key, ...] = (Key("download_input", block, micro_batch),)
    if phase == "backward" and block < s.last:  # until then the forward pass uses it
        needs += (Key("forward", block, micro_batch),)
    if phase == "backward" and on_ssd(s, block):
        read = s.add(
            Key("load_input", block, micro_batch),
            operations.SSD_READ,
            nbytes=size,
            needs=(Key("store_input", block, micro_batch),),
            takes=(_held(s, block, micro_batch),),
        )
        needs = (read,)
    return s.add(
        Key("upload_input", block, micro_batch, phase),
        operations.UPLOAD,
        nbytes=size,
        needs=needs,
        takes=s.on_device(("device_inputs", phase, block, micro_batch), size, device_input_slots(size)),
    )


def used(s: StepBuilder, phase: str, block: int, micro_batch: int) -> tuple[tuple, ...]:
    """Return the buffers of an input that are given back by the computation which used it."""
    if used_at_once(s, block, micro_batch) and not s.work.unified:
        return (("device_outputs", block, micro_batch),)
    given = () if phase == "forward" else (_held(s, block, micro_batch).name,)
    if phase == "backward" and s.kept[block]:  # nothing was brought
        return given
    return (*given, *s.off_device(("device_inputs", phase, block, micro_batch)))


def activations(s: StepBuilder, block: int, micro_batch: int) -> tuple[Hold, ...]:
    """Return the activations that a forward computation keeps for the backward pass; empty for a recomputed block.

    On a separate device they include the block's input.
    """
    if not s.kept[block]:
        return ()
    size = s.work.blocks[block].activation_bytes + (0 if s.work.unified else s.work.input_bytes)
    place = "host" if s.work.unified else "device"
    return (Hold(("activations", block, micro_batch), size, place, AS_LISTED),)


def used_activations(s: StepBuilder, block: int, micro_batch: int) -> tuple[tuple, ...]:
    """Return the names of these activations, given back by the backward computation."""
    return tuple(hold.name for hold in activations(s, block, micro_batch))


def made_grad(s: StepBuilder, block: int, micro_batch: int) -> tuple[Hold, ...]:
    """Return the buffers that a backward computation fills with the gradient of its input."""
    size = s.work.input_bytes
    on_device = s.on_device(("device_outputs", "grad", block, micro_batch), size, s.output_slots)
    if on_device and s.grad_stays(block, micro_batch):
        return on_device
    return (Hold(("input_grads", block, micro_batch), size, slots=s.in_flight + 1), *on_device)


def keep_grad(s: StepBuilder, block: int, micro_batch: int, made_by: Key) -> None:
    """Bring the gradient of a block's input to the host until the block before it needs the gradient."""
    s.add(
        Key("download_input_grad", block, micro_batch),
        operations.DOWNLOAD,
        nbytes=s.work.input_bytes,
        needs=(made_by,),
        gives=s.off_device(("device_outputs", "grad", block, micro_batch)),
    )


def fetch_grad(s: StepBuilder, block: int, micro_batch: int) -> Key:
    """Bring the gradient of a block's input to the device."""
    size = s.work.input_bytes
    slots = min(
        device_input_slots(size), max(DEVICE_SLOTS, s.in_flight)
    )  # no more gradients are there at once
    return s.add(
        Key("upload_input_grad", block, micro_batch),
        operations.UPLOAD,
        nbytes=size,
        needs=(Key("download_input_grad", block, micro_batch),),
        takes=s.on_device(("device_input_grads", block, micro_batch), size, slots),
    )


def used_grad(s: StepBuilder, block: int, micro_batch: int) -> tuple[tuple, ...]:
    """Return the buffers of an input's gradient that are given back by the computation which used it."""
    if not s.work.unified and s.grad_stays(block, micro_batch):
        return (("device_outputs", "grad", block, micro_batch),)
    return (("input_grads", block, micro_batch), *s.off_device(("device_input_grads", block, micro_batch)))


def enter(s: StepBuilder, micro_batch: int) -> tuple[Hold, ...]:
    """Return what a micro-batch that waits between two blocks keeps alive, from block 0 on.

    The model's own forward holds the input of the block that the micro-batch waits for, on the device.
    """
    if s.count == 1:
        return ()
    kind, place = ("frames", "host") if s.work.unified else ("device_frames", "device")
    return (Hold((kind, micro_batch), s.work.input_bytes, place, s.in_flight),)


def leave(s: StepBuilder, micro_batch: int) -> tuple[tuple, ...]:
    """Return the names of these buffers, given back by the last block's computation."""
    return tuple(hold.name for hold in enter(s, micro_batch))


def _held(s: StepBuilder, block: int, micro_batch: int) -> Hold:
    """Return the buffer of the input of ``block`` in host memory."""
    size = s.work.input_bytes
    if not s.training:
        return Hold(("inputs", block, micro_batch), size, slots=s.in_flight + 1)
    if on_ssd(s, block) or (block == s.last and s.spilled_rows):
        return Hold(("inputs", block, micro_batch), size, slots=s.in_flight + INPUT_SLOTS)
    return Hold(("kept_inputs", block, micro_batch), size, slots=s.kept_slots)


Pass = TypeVar("Pass", bound=tuple[Any, ...])
"""A pass over a block: phase, block, and the micro-batch where each has a pass of its own."""


def loaded(s: StepBuilder, passes: Sequence[Pass]) -> Iterator[tuple[Pass, tuple[Key, ...]]]:
    """Yield each pass, and the operations after which its compute copies are on the device.

    What the caller adds for a pass comes after the loads of the next one, unless nothing is loaded ahead.
    """
    there = load(s, *passes[0])
    for number, this in enumerate(passes):
        following = passes[number + 1 : number + 2]
        ahead = load(s, *following[0]) if following and s.loads_ahead else ()
        yield this, there
        there = load(s, *following[0]) if following and not s.loads_ahead else ahead


def load(s: StepBuilder, phase: str, block: int, micro_batch: int = -1) -> tuple[Key, ...]:
    """Bring the compute copies that a pass over ``block`` uses, as the previous step left them, to the device.

    Returns the operations after which they are there.
    """
    tied = [key for other in s.also_used(block) for key in _load(s, TIED, other, micro_batch)]
    return (*_load(s, phase, block, micro_batch), *tied, *_load_experts(s, phase, block, micro_batch))


def _load(s: StepBuilder, phase: str, block: int, micro_batch: int) -> tuple[Key, ...]:
    """Bring one compute copy to the device. Returns an empty tuple if the copy is there already."""
    if phase == "backward" and s.kept[block]:
        return ()
    b, on_host = s.work.blocks[block], s.placement.params[block]
    key = Key("upload_params", block, micro_batch, phase)
    name, device_name = _names(s, phase, block, micro_batch)
    is_kept, is_tied = s.kept[block] and phase == "forward", phase == TIED
    taken = s.on_device(device_name, b.param_bytes, AS_LISTED if is_kept else 1 if is_tied else PARAM_SLOTS)
    if on_host and s.work.ranks == 1:
        updated = (s.updated(block),)
        return (s.add(key, operations.UPLOAD, nbytes=b.param_bytes, needs_previous=updated, takes=taken),)
    slots = 1 if is_tied else s.param_slots
    buffer = Hold(name, b.param_bytes, slots=AS_LISTED if is_kept and s.work.unified else slots)
    ready: tuple[Key, ...] = ()
    if not on_host:
        kind = "store_state" if s.reads_state(block) else "store_params"
        stored = [Key(kind, block, tile=t) for t in s.tiles(block)]
        read = s.add(
            Key("load_params", block, micro_batch, phase),
            operations.SSD_READ,
            nbytes=b.kept_param_bytes,
            needs_previous=(*stored, *(() if is_tied else _earlier_updates(s))),
            takes=(buffer,),
        )
        ready = (read,)
    if s.work.ranks > 1:
        gathered = s.add(
            Key("gather_params", block, micro_batch, phase),
            operations.EXCHANGE,
            nbytes=b.param_gather_bytes,
            needs=ready,
            needs_previous=(s.updated(block),) if on_host else (),
            takes=(buffer,) if on_host else (),
        )
        ready = (gathered,)
    s.num_param_buffers += not (is_kept or is_tied)
    given = () if phase == "backward" and s.holds_copy(block) else s.off_device(name)
    return (s.add(key, operations.UPLOAD, nbytes=b.param_bytes, needs=ready, takes=taken, gives=given),)


def _load_experts(s: StepBuilder, phase: str, block: int, micro_batch: int) -> tuple[Key, ...]:
    """Read the experts of a pass, if they are counted. The slots that they come to are there all the time."""
    hold = _experts(s, phase, block, micro_batch)
    if hold is None:
        return ()
    nbytes = s.work.blocks[block].routed_bytes[phase == "backward"]
    nbytes = nbytes if micro_batch < 0 else nbytes // s.shape.micro_batches
    read = s.add(
        Key("load_experts", block, micro_batch, phase), operations.SSD_READ, nbytes=nbytes, takes=(hold,)
    )
    up = Key("upload_experts", block, micro_batch, phase)
    return (s.add(up, operations.UPLOAD, nbytes=nbytes, needs=(read,)),)


def _experts(s: StepBuilder, phase: str, block: int, micro_batch: int) -> Hold | None:
    """Return what keeps the experts of a pass from being read long before it; None if there are none."""
    if not s.work.blocks[block].routed_bytes[0]:
        return None
    return Hold(("expert_reads", phase, block, micro_batch), 0, slots=PARAM_SLOTS)


def _earlier_updates(s: StepBuilder) -> tuple[Key, ...]:
    """Return the updates of the previous step that may still hold a compute copy in host memory.

    Slots bound the buffers of steps of one kind. Where the previous step was of another kind, the first loads wait for
    these updates instead. Later loads wait for slots, and need none.
    """
    if s.num_param_buffers >= s.param_slots:
        return ()
    at_once = s.shape.clipping in ("none", "per_block")
    phases = (GUESS,) if s.training and not at_once else ("",) if s.training else ("", GUESS)
    blocks = [
        block for block in range(s.count) if s.reads_state(block) and not (s.training and s.delayed[block])
    ]
    found = [
        Key("update", block, phase=phase, tile=s.tiles(block)[-1]) for block in blocks for phase in phases
    ]
    made = {op.key for op in s.ops if op.key.kind == "update"}  # of this step
    return tuple(key for key in found if key not in made)


def release(s: StepBuilder, phase: str, block: int, micro_batch: int = -1) -> tuple[tuple, ...]:
    """Return the buffers that the last computation of a pass over ``block`` gives back."""
    tied = [name for other in s.also_used(block) for name in _released(s, TIED, other, micro_batch)]
    experts = _experts(s, phase, block, micro_batch)
    return (*_released(s, phase, block, micro_batch), *tied, *(() if experts is None else (experts.name,)))


def _released(s: StepBuilder, phase: str, block: int, micro_batch: int) -> tuple[tuple, ...]:
    if s.kept[block]:
        if phase == "forward":
            return ()
        if phase == "backward":
            phase = "forward"  # the pass that brought it
    name, device_name = _names(s, phase, block, micro_batch)
    if not s.work.unified:
        return (device_name,)
    stays = s.placement.params[block] and s.work.ranks == 1
    return () if stays or (phase == "backward" and s.holds_copy(block)) else (name,)


def held_copy(s: StepBuilder, block: int) -> tuple[tuple, ...]:
    """Return the buffer of a compute copy that the last update of ``block`` gives back; empty if there is none."""
    return (_names(s, "backward", block, -1)[0],) if s.holds_copy(block) else ()


def held_copies(ops: Iterable[Op]) -> frozenset[int]:
    """Return the blocks whose compute copy stays in host memory from the backward pass to the update."""
    updates = (op for op in ops if op.key.kind == "update")
    return frozenset(op.key.block for op in updates if any(name[0] == "params" for name in op.gives))


def _names(s: StepBuilder, phase: str, block: int, micro_batch: int) -> tuple[tuple, tuple]:
    """Return the names of the buffer on the host and of that on a separate device.

    Buffers that stay for the backward pass have classes of their own.
    """
    place, kept = (phase, block, micro_batch), s.kept[block] and phase == "forward"
    if phase == TIED:
        return ("tied_params", *place), ("tied_device_params", *place)
    on_host = "kept_params" if kept and s.work.unified else "params"
    return (on_host, *place), ("kept_device_params" if kept else "device_params", *place)
