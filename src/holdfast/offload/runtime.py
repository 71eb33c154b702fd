"""What the handlers of operations share: the model's units, the places of bytes, the store, the device.

``Runtime`` lives as long as the engine, ``Step`` as long as one step's operations: since a step's updates
and commit go on beside the next step, everything that belongs to a step is in its ``Step``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..io.buffers import Buffer
from ..plan.ops import Op
from ..plan.work import Placement, StepShape
from ..state.capture import buffer_at
from ..store.generations import Generations
from ..store.local import LocalStore
from ..store.scratch import Scratch
from ..update.mezo import Delta
from ..update.optimizer import HostOptimizer, HyperParameters
from .attributes import Attributes
from .blocks import Patch
from .boundaries import Boundary, Delivery, Tracker
from .device import Device
from .fellows import Fellows
from .microbatches import Coroutine
from .residency import Gradients, Residency
from .scaling import LossScale
from .units import Unit
from .weights import mean_of
from .zeroth import Zeroth


@dataclass
class Stored:
    """The newest generation of a file: which one, and its checksums."""

    generation: int
    checksums: tuple[str, ...]


@dataclass
class Runtime:
    """The engine's parts."""

    model: nn.Module
    device: Device
    fellows: Fellows
    seed: int
    blocks: list[Unit]
    resident: Unit
    placement: Placement
    optimizer: HostOptimizer
    residency: Residency
    store: LocalStore
    patch: Patch
    stored: dict[str, Generations]
    """The files of every unit, by the name under which a commit refers to them."""
    index: dict[str, Any]
    """Where each atom lies, as commits refer to it."""
    param_scratch: Scratch | None
    param_offsets: list[int]
    grad_scratch: Scratch | None
    grad_offsets: list[int]
    input_scratch: InputScratch
    resident_buffer: Buffer
    """The resident state image, in host memory."""
    resident_copy: torch.Tensor
    """The resident working copy, in host memory; on a unified device the leaves are views of it."""
    parameter_order: list[str]
    newest: dict[str, Stored] = field(default_factory=dict)
    """By the names of ``stored``: what the next commit refers to."""
    resident_leaves: dict[str, nn.Parameter] = field(default_factory=dict)
    """What the prologue and epilogue compute with, by name."""
    durable_step: int = -1
    """The newest step that survives power loss; -1 before the first commit."""
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes handed between host and device, by (lane, kind of operation)."""
    zeroth: Zeroth | None = None
    """Of a run of MeZO."""

    def __post_init__(self) -> None:
        self.attributes = Attributes(self.model, self.patch.blocks)

    @property
    def units(self) -> list[Unit]:
        """Every unit; the resident one is the last."""
        return [*self.blocks, self.resident]

    def agreed_buffers(self) -> dict[str, torch.Tensor]:
        """The model's persistent buffers as they are now on the first rank, which all others take. By name."""
        here = self.resident.buffer_values()
        if self.fellows.alone:
            return self.device.leave(here)
        values = {name: self.device.fetch(tensor) for name, tensor in here.items()}  # they are sent at once
        self.fellows.from_first(list(values.values()))
        if self.fellows.rank:
            for name, place in self.resident.buffers.items():
                buffer_at(place).copy_(values[name])
        return values

    def share(self, unit: Unit) -> float:
        """The part of all trained elements that ``unit`` has."""
        return unit.elements / sum(each.elements for each in self.units)


class InputScratch:
    """The SSD's room for block inputs: a slot for each block and micro-batch, given at its first use and
    again, twice as large, when an input has grown. ``open_extent(nbytes)`` makes another scratch file, and
    ``remove_extent`` removes one without slots."""

    def __init__(
        self, open_extent: Callable[[int], Scratch], remove_extent: Callable[[Scratch], None]
    ) -> None:
        self._open_extent, self._remove_extent = open_extent, remove_extent
        self._extent: Scratch | None = None
        self._end = 0
        self._slots: dict[tuple[int, int], tuple[Scratch, int, int]] = {}
        self._lock = threading.Lock()

    def slot(self, place: tuple[int, int], nbytes: int, more: int = 1) -> tuple[Scratch, int]:
        """The file and offset for ``place``, for which nothing is under way. A new file has room for ``more``
        inputs of this size."""
        with self._lock:
            held, offset, capacity = self._slots.get(place, (None, 0, 0))
            if held is not None and nbytes <= capacity:
                return held, offset
            capacity = max(nbytes, 2 * capacity)
            left = self._extent
            if left is None or self._end + capacity > left.nbytes:
                self._extent, self._end = self._open_extent(capacity * more), 0
            assert self._extent is not None
            slot = self._slots[place] = (self._extent, self._end, capacity)
            self._end += capacity
            used = {id(extent) for extent, _, _ in self._slots.values()}
            for old in {id(extent): extent for extent in (held, left) if extent is not None}.values():
                if id(old) not in used:
                    self._remove_extent(old)
            return slot[:2]


@dataclass
class MicroBatch:
    """One micro-batch of one step."""

    coroutine: Coroutine
    weight: float | None
    """What its loss is multiplied by; None divides it by the number of micro-batches."""
    tracker: Tracker = field(default_factory=Tracker)
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    """By the block that made it."""
    loss: float | torch.Tensor | None = None
    """A number once all losses have been checked."""
    result: Any = None


@dataclass
class Step:
    """One step (or evaluation, or save) under way."""

    number: int
    """Counted from 0; also the key of its random numbers. An evaluation has none: -1."""
    shape: StepShape
    operations: list[Op]
    training: bool = True
    horizontal: bool = False
    micro_batches: list[MicroBatch] = field(default_factory=list)
    hyper: HyperParameters | None = None
    clip_norm: float | None = None
    loss_scale: LossScale | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    resident_grads: Gradients | None = None
    losses: list[tuple[float, float | None]] = field(default_factory=list)
    """Of the micro-batches of all ranks, with what each was multiplied by; None is a plain mean."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """The model's persistent buffers, as the last computation has left them."""
    skipped: bool = False
    reason: str = ""
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Norm of each parameter's gradient, by name."""
    total_norm: float | None = None
    scale: torch.Tensor | None = None
    """What clips all gradients; None if they are left as they are."""
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """What clips those of one unit, by its name, where each is clipped by itself."""
    left_out: set[str] = field(default_factory=set)
    """Units that are not updated: each is clipped by itself, and their gradients are not finite."""
    unsettled: dict[str, Callable[[], None]] = field(default_factory=dict)
    """By unit: decides on its clipping, once its norm has arrived from the device."""
    _settling: threading.Lock = field(default_factory=threading.Lock)
    before: dict[int, Stored] = field(default_factory=dict)
    """The state that a guess began from, by block."""
    redone: bool = False
    """The norm is not what was guessed: what was updated before it was known is updated again."""
    touched: dict[int, set[str]] = field(default_factory=dict)
    """By block: which of the gradients that wait on the SSD there are."""
    delta: Delta | None = None
    """How far a zeroth-order step moves the weights, once that is known."""
    kept: tuple[bool, ...] = ()
    """Of a training step, per block: is it not computed again in the backward pass?"""

    def mean_losses(self) -> list[float]:
        """The loss, as micro-batches are weighted; of a zeroth-order step, that of each of its two streams."""
        count, batches = self.shape.micro_batches, self.micro_batches
        return [_mean_loss(batches[start : start + count]) for start in range(0, len(batches), count)]

    def settle_later(self, unit: Unit, decide: Callable[[], None]) -> None:
        """Have ``decide`` called before anybody asks what happens to ``unit``."""
        self.unsettled[unit.name] = decide

    def settle(self, unit: Unit | None = None) -> None:
        """Decide on the clipping of ``unit``, or of all. Its norm has arrived. Called by threads of updates and by the
        one that computes."""
        with self._settling:
            for name in [*self.unsettled] if unit is None else [unit.name]:
                self.unsettled.pop(name, lambda: None)()

    def leaves(self, unit: Unit) -> bool:
        """Is ``unit`` left as it is? One that a zeroth-order step has brought was moved by the step before."""
        self.settle(unit)
        return (self.skipped and self.delta is None) or unit.name in self.left_out

    def factor(self, unit: Unit) -> torch.Tensor | None:
        """What the gradients of ``unit`` are multiplied by."""
        self.settle(unit)
        return self.scales.get(unit.name, self.scale)


def _mean_loss(micro_batches: list[MicroBatch]) -> float:
    losses = [float(batch.loss or 0.0) for batch in micro_batches]
    return mean_of(losses, [batch.weight for batch in micro_batches])


def of(op: Op) -> dict[str, Any]:
    """How the SSD's queue orders and counts what ``op`` moves."""
    return {"kind": op.key.kind, "phase": op.key.phase, "priority": op.priority}
