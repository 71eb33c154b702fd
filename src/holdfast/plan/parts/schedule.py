"""A schedule under construction: operations so far, and what all parts need to know of the step.

The constants say how many buffers of a class there are. They are the trade between memory and overlap:
each is what keeps a lane busy while its neighbours work, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .. import ops
from ..ops import Hold, Key, Op
from ..orders import delayed_blocks, kept_blocks
from ..slots import AS_LISTED, with_slots
from ..work import Placement, StepShape, Work

PARAM_SLOTS = 2
"""Working copies loaded at once, on the host and on the device each: the one that computes and the next."""
STATE_SLOTS = 3
"""Optimizer states in memory at once: being read, updated, written."""
GRAD_SLOTS = 2
"""Blocks whose gradients are on the host at once, unless they stay: being summed, being consumed."""
UPDATED_SLOTS = 2
"""Updated working copies on their way to the SSD."""
REDO_SLOTS = 2
"""Optimizer states that are read again because a guess was wrong: one is updated, the next is read."""
INPUT_SLOTS = 4
"""Block inputs on their way to or from the SSD."""
DEVICE_SLOTS = 2
"""On a separate device: gradients of a block, inputs, and gradients of inputs, each in use and the next."""
OUTPUT_SLOTS = 4
"""Tensors on their way from a separate device: two per computation, which is what block 0 makes."""


@dataclass(kw_only=True)
class Schedule:
    """A growing list of operations for one step of ``work``."""

    work: Work
    placement: Placement
    shape: StepShape
    keeps_grads: bool = False
    """Gradients of every block wait for the end of the backward pass."""
    in_flight: int = 1
    """Micro-batches that are between two blocks at once."""
    keeps_last_input: bool = False
    """The last block's input leaves the device before it is used."""
    training: bool = True
    """An evaluation keeps an input only until it is used."""
    ops: list[Op] = field(default_factory=list)
    computed: Key | None = None
    """The last computation so far."""

    @property
    def count(self) -> int:
        return len(self.work.blocks)

    @property
    def last(self) -> int:
        return self.count - 1

    @cached_property
    def delayed(self) -> tuple[bool, ...]:
        """Per block: is it updated beside the next forward pass, although its gradients need not wait?"""
        return (False,) * self.count if self.keeps_grads else delayed_blocks(self.shape, self.count)

    @cached_property
    def kept(self) -> tuple[bool, ...]:
        """Per block: do its activations and parameters stay from its forward pass to its backward pass?"""
        return kept_blocks(self.shape, self.count)

    def backward_work(self, block: int) -> float:
        """Floating-point operations of a backward computation of ``block``."""
        b = self.work.blocks[block]
        return b.backward_work - (b.forward_flop if self.kept[block] else 0.0)

    def waits(self, block: int) -> bool:
        """Do the gradients of ``block`` wait for the end of the backward pass?"""
        return self.keeps_grads or self.delayed[block]

    def guesses(self, block: int) -> bool:
        """Is ``block`` updated before the norm is known, and again where the norm says otherwise?"""
        return self.shape.clipping == "speculate" and not delayed_blocks(self.shape, self.count)[block]

    def lent(self, block: int) -> int:
        """How many buffers of used block inputs hold the delayed gradients of ``block``; 0 if they have their own."""
        if not self.delayed[block] or not self.placement.gradients[block] or not self.work.input_bytes:
            return 0
        count = -(-self.work.blocks[block].kept_grad_bytes // self.work.input_bytes)
        return count if count <= self.kept_inputs else 0

    @cached_property
    def kept_inputs(self) -> int:
        """Block inputs that stay in host memory until their backward."""
        if self.count == 1:
            return 0
        rows = self.last - self.spilled_rows + (self.keeps_last_input and not self.spilled_rows)
        return rows * self.in_flight

    @cached_property
    def kept_slots(self) -> int:
        """How many buffers there are for them, and for the gradients that are kept in them."""
        lends = any(self.lent(block) for block in range(self.count))
        return AS_LISTED if lends else self.kept_inputs

    @cached_property
    def spilled_rows(self) -> int:
        """Blocks whose inputs go to the SSD."""
        if not self.training:
            return 0
        stays = zip(self.placement.activations[: self.last], self.kept)
        return sum(not (on_host or kept) for on_host, kept in stays)

    def add(self, key: Key, lane: str, **fields: Any) -> Key:
        self.ops.append(Op(key, lane, **fields))
        return key

    def compute(self, key: Key, needs: tuple[Key, ...] = (), **fields: Any) -> Key:
        """A computation, after the one before it."""
        chain = () if self.computed is None else (self.computed,)
        self.computed = self.add(key, ops.COMPUTE, needs=tuple(dict.fromkeys((*chain, *needs))), **fields)
        return key

    def finish(self) -> list[Op]:
        """The whole list, with the waits that keep every class of buffers within its slots."""
        return with_slots(self.ops)

    def on_device(self, name: tuple, nbytes: int, slots: int) -> tuple[Hold, ...]:
        """A buffer on the device, unless that is host memory."""
        return () if self.work.unified else (Hold(name, nbytes, "device", slots),)

    def off_device(self, name: tuple) -> tuple[tuple, ...]:
        """The name of a buffer on the device, unless that is host memory."""
        return () if self.work.unified else (name,)
