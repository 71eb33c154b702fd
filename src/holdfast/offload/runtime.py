"""The state that the handlers of operations share: the model's units, the places of bytes, the store, the device.

``Runtime`` lives as long as the engine, ``Step`` as long as one step's operations. A step's updates and commit continue
beside the next step, so everything that belongs to a step is in its ``Step``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..optim.host_optimizer import HostOptimizer, HyperParameters
from ..optim.mezo import Delta
from ..schedule.operations import Op
from ..schedule.work import BlockPlacement, StepShape
from ..state.capture import buffer_at
from ..store.commit.generations import Generations
from ..store.run_store import LocalStore
from ..store.scratch import Scratch
from .data_parallel import DataParallelGroup
from .loss_scaling import LossScale, mean_of
from .memory.block_states import BlockState
from .memory.device import Device
from .memory.expert_reader import ExpertReader
from .memory.graph_sizes import GraphGauge
from .memory.parameter_shards import CopyPart
from .memory.residency import Gradients, ParameterSamples, Residency
from .memory.transient_buffers import BuffersInManifest
from .memory.zeroth_order import ZerothOrderState
from .model.absent_parameters import AbsentParameters
from .model.block_attributes import AttributeWatch
from .model.blocks import Patch
from .model.boundaries import BlockOutput, Boundary, OriginTracker
from .model.microbatches import Coroutine


@dataclass
class StoredBlock:
    """The newest generation of a file, and its checksums."""

    generation: int
    checksums: tuple[str, ...]


@dataclass
class Runtime:
    """The engine's parts."""

    model: nn.Module
    device: Device
    data_parallel: DataParallelGroup
    seed: int
    blocks: list[BlockState]
    resident: BlockState
    placement: BlockPlacement
    optimizer: HostOptimizer
    residency: Residency
    store: LocalStore
    patch: Patch
    stored: dict[str, Generations]
    """The files of every unit, by the name that commits use."""
    index: dict[str, Any]
    """The place of each tensor entry, as commits refer to it."""
    param_scratch: Scratch | None
    param_offsets: list[int]
    grad_scratch: Scratch | None
    grad_offsets: list[int]
    input_scratch: InputScratch
    resident_copy: torch.Tensor
    """The resident compute copy, in host memory; on a unified device the leaves are views of it."""
    parameter_order: list[str]
    transient: BuffersInManifest
    """The model's buffers that are not persistent."""
    newest: dict[str, StoredBlock] = field(default_factory=dict)
    """The newest generation of each file, by the names in ``stored``; the next commit refers to these."""
    resident_leaves: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that the prologue and epilogue compute with, by name."""
    durable_step: int = -1
    """The newest step that survives power loss; -1 before the first commit."""
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes handed between host and device, by (lane, kind of operation)."""
    zeroth: ZerothOrderState | None = None
    """State of a MeZO run; None for other optimizers."""
    expert_slots: int = 0
    """Number of experts that are held at once, where blocks are without theirs."""

    def __post_init__(self) -> None:
        self.attributes = AttributeWatch(self.model, self.patch.blocks)
        self.experts = ExpertReader(
            self.blocks, self.device, self.residency.lend, self.stored, self.newest, self.expert_slots
        )
        self.absent = AbsentParameters(
            self.blocks, self.resident, self.patch.blocks, self.device.torch_device, self.experts
        )

    @property
    def units(self) -> list[BlockState]:
        """Every unit; the resident one is the last."""
        return [*self.blocks, self.resident]

    @property
    def epilogue(self) -> int | None:
        """The number of the epilogue's unit among ``blocks``; None if its parameters stay on the device."""
        return len(self.blocks) - 1 if self.patch.blocks.epilogue else None

    def reads_state(self, block: int) -> bool:
        """Return whether passes over ``block`` read the compute copy from the files of its state."""
        stays = self.placement.params[block] or self.placement.optimizer[block]
        return self.blocks[block].is_split and not stays

    def scratch_parts(self, block: int) -> list[CopyPart]:
        """Return the parts of a block's compute copy, none of them empty, that are in the scratch."""
        unit = self.blocks[block]
        first = unit.trained_copy_bytes if self.reads_state(block) else 0
        return [part for part in unit.copy_parts if part.start < part.stop and part.start >= first]

    @property
    def tied(self) -> int | None:
        """The number of the embedding's unit whose parameter the epilogue uses too; None if there is none."""
        return self.patch.blocks.tied

    def state_stays(self, unit: int) -> bool:
        """Return whether the state of the unit with this number stays in host memory."""
        if unit == len(self.blocks):
            return self.placement.saving.resident_state
        return self.placement.optimizer[unit]

    def agreed_buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's persistent buffers by name, as they are now on the first rank; all ranks take them.

        Collective: every rank must call this.
        """
        here = self.resident.buffer_values()
        if self.data_parallel.alone:
            return self.device.leave(here)
        values = {name: self.device.fetch(tensor) for name, tensor in here.items()}  # all are sent at once
        self.data_parallel.from_first(list(values.values()))
        if self.data_parallel.rank:
            for name, place in self.resident.buffers.items():
                buffer_at(place).copy_(values[name])
        return values

    def share(self, unit: BlockState) -> float:
        """Return the fraction of all trained elements that ``unit`` has."""
        return unit.elements / sum(each.elements for each in self.units)

    def close(self) -> None:
        """Close the store and release all memory. Nothing may be under way."""
        self.store.queue.close()  # nothing is under way any more when files are closed
        self.store.close()
        self.resident_leaves.clear()  # their hooks refer to the runtime, in a cycle that is never collected
        if self.zeroth is not None:
            self.zeroth.release()
        self.experts.release()
        self.residency.release()


class InputScratch:
    """The SSD scratch for block inputs: a slot for each block and micro-batch.

    A slot is assigned at its first use, and again, twice as large, when an input has grown. ``open_extent(nbytes)``
    creates another scratch file, and ``remove_extent`` removes one without slots.
    """

    def __init__(
        self, open_extent: Callable[[int], Scratch], remove_extent: Callable[[Scratch], None]
    ) -> None:
        self._open_extent, self._remove_extent = open_extent, remove_extent
        self._extent: Scratch | None = None
        self._end = 0
        self._slots: dict[tuple[int, int], tuple[Scratch, int, int]] = {}
        self._lock = threading.Lock()

    def slot(self, place: tuple[int, int], nbytes: int, more: int = 1) -> tuple[Scratch, int]:
        """Return the file and offset for ``place``, for which nothing may be under way.

        A new file has room for ``more`` inputs of this size.
        """
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
    """Factor for the micro-batch's loss; None divides the loss by the number of micro-batches."""
    lacks_targets: Callable[[], bool] = lambda: False
    """Returns whether the micro-batch has no targets, so that its loss is NaN."""
    tracker: OriginTracker = field(default_factory=OriginTracker)
    boundaries: dict[int, Boundary] = field(default_factory=dict)
    deliveries: dict[int, BlockOutput] = field(default_factory=dict)
    """Outputs of blocks, by the block that made them."""
    loss: float | torch.Tensor | None = None
    """The loss, as a float once all losses have been checked."""
    returned: list[torch.Tensor] = field(default_factory=list)
    """The least and the largest element of each gradient that came back to the last block's output."""
    result: Any = None


@dataclass
class Step:
    """One step (or evaluation, or save) under way."""

    number: int
    """Number of the step, counted from 0; also the key of its random numbers. -1 for an evaluation, which has none."""
    shape: StepShape
    operations: list[Op]
    training: bool = True
    horizontal: bool = False
    micro_batches: list[MicroBatch] = field(default_factory=list)
    hyper: HyperParameters | None = None
    clip_norm: float | None = None
    loss_scale: LossScale | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    late_progress: Future[dict[str, Any]] | None = None
    """The progress, where it is that after the loop's own code of the step. The commit waits for it."""
    resident_grads: Gradients | None = None
    downloaded: dict[int, Gradients] = field(default_factory=dict)
    """Parts of the resident gradients that were brought from a separate device, by tile."""
    losses: list[tuple[float, float | None]] = field(default_factory=list)
    """Losses of the micro-batches of all ranks, each with its factor; None is a plain mean."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """The model's persistent buffers after the last computation."""
    transient: dict[str, Any] = field(default_factory=dict)
    """Other buffers that training has changed, after the last computation, as a commit holds them."""
    skipped: bool = False
    reason: str = ""
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Norm of each parameter's gradient, by name."""
    total_norm: float | None = None
    scale: torch.Tensor | None = None
    """Factor that clips all gradients; None if they are left as they are."""
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Factor that clips the gradients of a unit, by unit name, where each unit is clipped by itself."""
    left_out: set[str] = field(default_factory=set)
    """Names of the units that are not updated, because their gradients are not finite; each is clipped by itself."""
    unsettled: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Functions that decide on the clipping of a unit once its norm has arrived from the device, by unit name."""
    _settling: threading.Lock = field(default_factory=threading.Lock)
    before: dict[tuple[int, int], StoredBlock] = field(default_factory=dict)
    """The state before a guess, by block and tile."""
    redone: bool = False
    """True if the norm is not as guessed, so that updates made before it was known are made again."""
    touched: dict[int, set[str]] = field(default_factory=dict)
    """Names of the parameters whose gradients wait on the SSD, by block."""
    delta: Delta | None = None
    """Distance by which a zeroth-order step moves the weights, once that is known."""
    held_copies: frozenset[int] = frozenset()
    """Blocks whose compute copy stays in host memory from the backward pass to the update."""
    sampled: list[tuple[ParameterSamples, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Samples of compute copies on a separate device, before and after a pass, which are not yet compared."""
    kept: tuple[bool, ...] = ()
    """Flags per block of a training step: True if its graph is kept, so that it is not computed again."""
    must_repeat: bool = False
    """True if all blocks have to be such as can be computed again, because the free memory decides which are."""
    gauge: GraphGauge | None = None
    """Measures the graphs of blocks that are computed again; None in most steps."""
    results: dict[str, Any] | None = None
    """Results that own calls leave for the commit; None if the micro-batches are no own calls."""

    def all_results(self) -> dict[str, Any]:
        """Return the part of a commit that own calls and the step's end decide, as JSON; empty without own calls."""
        if self.results is None:
            return {}
        return {"results": self.results | {"grad_norm": self.total_norm}}

    def mean_losses(self) -> list[float]:
        """Return the loss, as micro-batches are weighted; for a zeroth-order step, that of each of its two streams."""
        count, batches = self.shape.micro_batches, self.micro_batches
        return [_mean_loss(batches[start : start + count]) for start in range(0, len(batches), count)]

    def settle_later(self, unit: BlockState, decide: Callable[[], None]) -> None:
        """Have ``decide`` called before the clipping of ``unit`` is used."""
        self.unsettled[unit.name] = decide

    def decide_clipping(self, unit: BlockState | None = None) -> None:
        """Decide on the clipping of ``unit``, or of all units, whose norms have arrived.

        Called by the threads of updates and by the thread that computes.
        """
        with self._settling:
            for name in [*self.unsettled] if unit is None else [unit.name]:
                self.unsettled.pop(name, lambda: None)()

    def leaves(self, unit: BlockState) -> bool:
        """Return whether ``unit`` stays as it is.

        A unit that a zeroth-order step has read was moved by the step before, so it does not.
        """
        self.decide_clipping(unit)
        return (self.skipped and self.delta is None) or unit.name in self.left_out

    def factor(self, unit: BlockState) -> torch.Tensor | None:
        """Return the factor for the gradients of ``unit``; None leaves them as they are."""
        self.decide_clipping(unit)
        return self.scales.get(unit.name, self.scale)


def _mean_loss(micro_batches: list[MicroBatch]) -> float:
    losses = [float(batch.loss or 0.0) for batch in micro_batches]
    return mean_of(losses, [batch.weight for batch in micro_batches])


def of(op: Op) -> dict[str, Any]:
    """Return how the SSD's queue orders and counts the bytes that ``op`` moves."""
    return {"kind": op.key.kind, "phase": op.key.phase, "priority": op.priority}
