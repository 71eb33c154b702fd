"""Memory: the most that a schedule can hold, from its list alone.

Bytes. For each class of buffers that is the sum of its largest, as many as it has slots, which holds for
lanes of any speed (``slots.py``); and there is what stays for good. ``predict`` is what a budget is checked
against: an upper bound that a run with a slow SSD reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .ops import Op
from .vertical import vertical
from .work import Placement, StepShape, Work

MakesOps = Callable[[Work, Placement, StepShape], list[Op]]
"""A schedule."""


@dataclass(frozen=True)
class Memory:
    """The most bytes that can be held at once, by (place, what): buffers by their class, and what stays."""

    parts: dict[tuple[str, str], int]

    def at(self, place: str) -> dict[str, int]:
        """What lies at ``place``, the largest first."""
        found = {what: size for (where, what), size in self.parts.items() if where == place and size}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def host_bytes(self) -> int:
        return sum(self.at("host").values())

    @property
    def device_bytes(self) -> int:
        return sum(self.at("device").values())


def predict(work: Work, placement: Placement, shape: StepShape, schedule: MakesOps = vertical) -> Memory:
    """What running ``schedule`` takes. An evaluation (``forward_only``) has micro-batches of its own number,
    so a run takes the larger of both."""
    return Memory({**buffers(schedule(work, placement, shape)), **resident(work, placement)})


def buffers(ops: Iterable[Op]) -> dict[tuple[str, str], int]:
    """The most bytes of each class, by (place, class), whatever the speeds of the lanes."""
    sizes: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for op in ops:
        for hold in op.takes:
            sizes[hold.place, hold.kind, hold.slots].append(hold.nbytes)
    return {
        (place, kind): sum(sorted(found, reverse=True)[: slots or None])
        for (place, kind, slots), found in sizes.items()
    }


def resident(work: Work, placement: Placement) -> dict[tuple[str, str], int]:
    """What stays for good."""
    device = "host" if work.unified else "device"

    def chosen(stays: tuple[bool, ...], size: str) -> int:
        return sum(getattr(block, size) for block, here in zip(work.blocks, stays) if here)

    return {
        ("host", "resident_state"): work.resident_state_bytes,
        ("host", "params_on_host"): chosen(placement.params, "param_bytes"),
        ("host", "optimizer_on_host"): chosen(placement.optimizer, "state_bytes"),
        (device, "resident_working_copy"): work.resident_param_bytes,
        (device, "resident_sums"): work.resident_grad_bytes,
        (device, "workspace"): work.workspace_bytes,
    }
