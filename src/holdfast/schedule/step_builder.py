"""A schedule under construction: the operations so far, and the dependencies that keep its memory bounded.

The constants say how many buffers of a class there are: each is the number that keeps a lane busy while its neighbours
work, and no more. ``with_slots`` turns them into dependencies: in list order, take number i of a class waits for give
number i - slots, of this step or of the previous one. So each buffer taken beyond ``slots`` is matched with one given
back. No more are ever held, whatever the speeds of the lanes, and ``memory_use`` needs no simulation. Used by all
schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..quantities import MiB
from . import operations
from .operations import Hold, Key, Op
from .work import BlockPlacement, StepShape, Work, delayed_blocks, kept_blocks, micro_batches

PARAM_SLOTS = 2
"""Compute copies loaded at once, on the host and on the device each: the one in use and the next."""
STATE_SLOTS = 3
"""Optimizer states in memory at once: being read, updated, written."""
SHORT_STATE_SLOTS = 2
"""The same where memory is short: being updated, and read or written."""
RESIDENT_GRAD_SLOTS = 2
"""Tiles whose gradients are brought from a separate device at once: being consumed, and next."""
UPDATED_SLOTS = 2
"""Updated compute copies on their way to the SSD."""
REDO_SLOTS = 2
"""Optimizer states that are read again because a guess was wrong: one is updated, the next is read."""
INPUT_SLOTS = 4
"""Block inputs on their way to or from the SSD."""
DEVICE_SLOTS = 2
"""Buffers of a class on a separate device: in use, and next."""
OUTPUT_SLOTS = 4
"""Tensors on their way from a separate device: two per computation, as many as block 0 makes."""
AS_LISTED = -1
"""Number of slots that a class holds at once if its operations run one after another, in list order."""
STAYING_BYTES = 512 * MiB
"""The most device memory that tensors between two blocks take, of all micro-batches, where they stay on the device."""
LEAD_BYTES = 64 * MiB
"""The size of a block input up to which computations on it may be too short for the host to start the next in time."""


def device_input_slots(input_bytes: float) -> int:
    """Return the buffers on a separate device for block inputs, and for their gradients: in use, and next.

    Small ones have two more, so that the host, which learns late that a computation is over, has a lead. An unknown
    size is given as 0.
    """
    return DEVICE_SLOTS + (2 if 0 < input_bytes <= LEAD_BYTES else 0)


def inputs_stay_on_device(input_bytes: float, micro_batches: int) -> bool:
    """Return whether what flows between two blocks may stay on a separate device until the next block uses it.

    That takes device memory for the inputs of all micro-batches, and saves three copies of five. A size of 0 is
    unknown.
    """
    return 0 < input_bytes * micro_batches <= STAYING_BYTES


@dataclass(kw_only=True)
class StepBuilder:
    """A growing list of operations for one step of ``work``."""

    work: Work
    placement: BlockPlacement
    shape: StepShape
    keeps_grads: bool = False
    """True if gradients of every block wait for the end of the backward pass."""
    in_flight: int = 1
    """Number of micro-batches that are between two blocks at once."""
    block_by_block: bool = False
    """True if all micro-batches of a training step go through a block before any goes through the next."""
    training: bool = True
    """True for a training step. An evaluation keeps an input only until it is used."""
    ops: list[Op] = field(default_factory=list)
    computed: Key | None = None
    """The last computation so far."""
    num_param_buffers: int = 0
    """Number of buffers of the class ``params`` that operations have taken so far."""

    @property
    def count(self) -> int:
        return len(self.work.blocks)

    @property
    def last(self) -> int:
        return self.count - 1

    def also_used(self, block: int) -> tuple[int, ...]:
        """Return the tied block, if a pass over ``block`` uses its parameters besides its own."""
        tied = self.work.tied_block
        return () if tied is None or block != self.last else (tied,)

    @cached_property
    def all_stay(self) -> bool:
        """True if every input and gradient is still on a separate device when the next block needs it."""
        there = self.block_by_block and not self.work.unified
        may = there and self.placement.saving.inputs_stay
        return may and inputs_stay_on_device(self.work.input_bytes, self.in_flight)

    @property
    def output_slots(self) -> int:
        """Number of tensors that flow between blocks and are on a separate device because a computation made them."""
        return OUTPUT_SLOTS + (self.in_flight if self.all_stay else 0)

    def input_stays(self, block: int, micro_batch: int) -> bool:
        """Return whether the input of ``block`` is still on the device when ``block`` needs it."""
        first = self.shape.order == "snake" and micro_batch == micro_batches(self.shape, block)[0]
        return block > 0 and (first or self.all_stay)

    def grad_stays(self, block: int, micro_batch: int) -> bool:
        """Return whether the gradient of the block's input is still on the device when the block before needs it."""
        last = self.shape.order == "snake" and micro_batch == micro_batches(self.shape, block)[-1]
        return block > 0 and (last or self.all_stay)

    @cached_property
    def delayed(self) -> tuple[bool, ...]:
        """Flags per block: True if it is updated beside the next forward pass although its gradients need not wait."""
        return (False,) * self.count if self.keeps_grads else delayed_blocks(self.shape, self.count)

    @cached_property
    def kept(self) -> tuple[bool, ...]:
        """Flags per block: True if its activations and parameters stay from its forward pass to its backward pass."""
        return kept_blocks(self.shape, self.count)

    def backward_work(self, block: int) -> float:
        """Return the floating-point operations of a backward computation of ``block``."""
        b = self.work.blocks[block]
        return b.backward_work - (b.forward_flop if self.kept[block] else 0.0)

    def tiles(self, block: int) -> range:
        """Return the numbers of the block's tiles."""
        return range(len(self.work.blocks[block].tiles))

    def updated(self, block: int) -> Key:
        """Return the block's last update, which is over after those of its other tiles."""
        return Key("update", block, tile=self.tiles(block)[-1])

    def reads_state(self, block: int) -> bool:
        """Return whether passes over ``block`` read the compute copy from the files of its state."""
        return self.placement.reads_state(self.work, block)

    def stores_params(self, block: int) -> bool:
        """Return whether an update of ``block`` writes its compute copy to the scratch."""
        return not (self.placement.params[block] or self.reads_state(block))

    def copy_is_in_memory(self, block: int) -> bool:
        """Return whether an update of ``block`` finds the compute copy, a part of the masters, in host memory."""
        on_host = self.work.blocks[block].is_split and self.placement.params[block]
        return on_host or self.holds_copy(block)

    def holds_copy(self, block: int) -> bool:
        """Return whether the compute copy that the backward pass of ``block`` reads stays in memory for the update."""
        soon = not delayed_blocks(self.shape, self.count)[block] and (
            self.guesses(block) or not self.keeps_grads
        )
        return (
            soon and self.placement.saving.keeps_copies and self.reads_state(block) and not self.kept[block]
        )

    @cached_property
    def loads_ahead(self) -> bool:
        """True if compute copies and states are read before they are needed."""
        return self.placement.loads_ahead(self.work)

    @cached_property
    def param_slots(self) -> int:
        """Number of compute copies in host memory at once: one more where one waits for its update."""
        holds = self.training and any(self.holds_copy(block) for block in range(self.count))
        return (PARAM_SLOTS if self.loads_ahead else 1) + holds

    @cached_property
    def state_slots(self) -> int:
        """Number of optimizer states in memory at once."""
        return STATE_SLOTS if self.loads_ahead else SHORT_STATE_SLOTS

    def workspace(self, block: int, micro_batch: int) -> tuple[Hold, ...]:
        """Return the buffers that a computation of ``block`` takes if it needs more memory than a repeated block does.

        Where memory is short they are all those of optimizer states, so none of these is in memory meanwhile. Otherwise
        there are none, because the memory is there all the time.
        """
        nbytes, count = self.work.blocks[block].extra_workspace_bytes, self.state_slots
        if self.loads_ahead or not nbytes:
            return ()
        names = [("state", "workspace", block, micro_batch, part) for part in range(count)]
        return tuple(Hold(name, -(-nbytes // count), slots=count) for name in names)

    def waits(self, block: int) -> bool:
        """Return whether the gradients of ``block`` wait for the end of the backward pass."""
        return self.keeps_grads or self.delayed[block]

    def guesses(self, block: int) -> bool:
        """Return whether ``block`` is updated before the norm is known, and again where the norm is not as guessed."""
        return self.shape.clipping == "speculate" and not delayed_blocks(self.shape, self.count)[block]

    def borrowed_buffers(self, block: int) -> int:
        """Return how many buffers of used block inputs hold the delayed gradients of ``block``; 0 if they have their
        own."""
        if not self.delayed[block] or not self.placement.gradients[block] or not self.work.input_bytes:
            return 0
        if block == self.work.tied_block:  # its sum begins when all inputs are still needed
            return 0
        count = -(-self.work.blocks[block].kept_grad_bytes // self.work.input_bytes)
        return count if count <= self.kept_inputs else 0

    @cached_property
    def kept_inputs(self) -> int:
        """Number of block inputs that stay in host memory until their backward."""
        if self.count == 1:
            return 0
        leaves = self.block_by_block and not self.all_stay  # the last block's inputs, before they are used
        rows = self.last - self.spilled_rows + (leaves and not self.spilled_rows)
        return rows * self.in_flight

    @cached_property
    def kept_slots(self) -> int:
        """Number of buffers for kept inputs, and for the gradients that are kept in them."""
        lends = any(self.borrowed_buffers(block) for block in range(self.count))
        return AS_LISTED if lends else self.kept_inputs

    @cached_property
    def spilled_rows(self) -> int:
        """Number of blocks whose inputs go to the SSD."""
        if not self.training:
            return 0
        stays = zip(self.placement.activations[: self.last], self.kept)
        return sum(not (on_host or kept) for on_host, kept in stays)

    def add(self, key: Key, lane: str, **fields: Any) -> Key:
        self.ops.append(Op(key, lane, **fields))
        return key

    def compute(self, key: Key, needs: tuple[Key, ...] = (), **fields: Any) -> Key:
        """Add a computation that needs the one before it."""
        chain = () if self.computed is None else (self.computed,)
        self.computed = self.add(
            key, operations.COMPUTE, needs=tuple(dict.fromkeys((*chain, *needs))), **fields
        )
        return key

    def finish(self) -> list[Op]:
        """Return the whole list, with the waits that keep every class of buffers within its slots."""
        return with_slots(self.ops)

    def on_device(self, name: tuple, nbytes: int, slots: int) -> tuple[Hold, ...]:
        """Return a buffer on the device; empty if the device is host memory."""
        return () if self.work.unified else (Hold(name, nbytes, "device", slots),)

    def off_device(self, name: tuple) -> tuple[tuple, ...]:
        """Return the name of a buffer on the device; empty if the device is host memory."""
        return () if self.work.unified else (name,)


@dataclass
class _Class:
    """A class of buffers: indices of the operations that take and give back, in list order."""

    slots: int
    takers: list[int] = field(default_factory=list)
    givers: list[int] = field(default_factory=list)


def with_slots(ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` with the dependencies that keep every class of buffers within its slots.

    The operation that a buffer waits for must come before it in the list; a schedule that breaks this needs more slots.
    """
    ops = _counted(ops)
    needs: dict[int, list[Key]] = {}
    needs_previous: dict[int, list[Key]] = {}
    for kind, found in _classes(ops).items():
        slots = min(found.slots, len(found.takers))
        for index, taker in enumerate(found.takers if slots else ()):
            giver = found.givers[index - slots]  # counted from the end, so of the previous step, if negative
            assert index < slots or giver < taker, f"{ops[taker].key} needs more than {slots} slots of {kind}"
            (needs_previous if index < slots else needs).setdefault(taker, []).append(ops[giver].key)
    return [_with(op, needs.get(i, ()), needs_previous.get(i, ())) for i, op in enumerate(ops)]


def _counted(ops: Sequence[Op]) -> Sequence[Op]:
    """Return ``ops`` with ``AS_LISTED`` replaced by a number."""
    counted = {hold.kind for op in ops for hold in op.takes if hold.slots == AS_LISTED}
    if not counted:
        return ops
    held, most = Counter[str](), Counter[str]()
    for op in ops:
        held.update(hold.kind for hold in op.takes)
        most |= held
        held.subtract(name[0] for name in op.gives)
    return [op._replace(takes=tuple(_counting(hold, counted, most) for hold in op.takes)) for op in ops]


def _counting(hold: Hold, counted: set[str], most: Counter[str]) -> Hold:
    return hold._replace(slots=most[hold.kind]) if hold.kind in counted else hold


def _classes(ops: Sequence[Op]) -> dict[str, _Class]:
    classes: dict[str, _Class] = {}
    for index, op in enumerate(ops):
        for hold in op.takes:
            found = classes.get(hold.kind)
            if found is None:
                found = classes[hold.kind] = _Class(hold.slots)
            assert found.slots == hold.slots, f"{hold.kind} has both {found.slots} and {hold.slots} slots"
            found.takers.append(index)
        for name in op.gives:
            classes[name[0]].givers.append(index)
    return classes


def _with(op: Op, needs: Sequence[Key], needs_previous: Sequence[Key]) -> Op:
    if not needs and not needs_previous:
        return op
    return op._replace(
        needs=tuple(dict.fromkeys((*op.needs, *needs))),
        needs_previous=tuple(dict.fromkeys((*op.needs_previous, *needs_previous))),
    )
