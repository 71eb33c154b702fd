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
from ..slots import with_slots
from ..work import Placement, StepShape, Work

PARAM_SLOTS = 2
"""Working copies loaded at once, on the host and on the device each: the one that computes and the next."""
STATE_SLOTS = 3
"""Optimizer states in memory at once: being read, updated, written."""
GRAD_SLOTS = 2
"""Blocks whose gradients are on the host at once, unless they stay: being summed, being consumed."""
UPDATED_SLOTS = 2
"""Updated working copies on their way to the SSD."""
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
    def spilled_rows(self) -> int:
        """Blocks whose inputs go to the SSD."""
        return sum(not stays for stays in self.placement.activations[: self.last]) if self.training else 0

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
