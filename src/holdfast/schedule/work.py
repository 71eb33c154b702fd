"""The work of a step: sizes and FLOPs of a model, its placement in host memory, and the step's shape.

Sizes are bytes as they are moved, rounded to pages where the SSD is concerned, so that traffic computed from them is
exact. ``"plain"`` order is ascending everywhere, so that gradients are added as in an ordinary accumulation loop.
``"snake"`` turns at every block, so the last micro-batch of a block is the first of the next, and the tensors between
the two stay on the device; gradients of odd blocks are then added in reverse order. The delayed fraction (alpha) is of
whole blocks, whose updates are left to the next forward pass. Measured by the engine, read by schedules and planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..quantities import MiB

TILE_BYTES = 128 * MiB
"""The size of a tile: the state of a block that is larger is read, updated and written in several."""


def tile_count(state_bytes: int) -> int:
    """Return the number of tiles in which a state of ``state_bytes`` is updated."""
    return max(1, -(-state_bytes // TILE_BYTES))


EXPERTS_AHEAD = 2
"""Experts that are read while another one computes, where experts are read one by one."""

ClippingMode = Literal["none", "defer", "speculate", "per_block"]
"""The way in which an update gets the factor that clips its gradients (``docs/schedule.md``)."""
CLIPPING = ("none", "defer", "speculate", "per_block")
KINDS = ("params", "optimizer", "activations", "gradients")
"""The kinds of data of which a fraction of the blocks may stay in host memory."""
NOUNS = {"params": "parameters", "optimizer": "optimizer state", "activations": "block inputs"}
"""Names, in messages, of the kinds of data that a placement may keep in host memory."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of one model with micro-batches of one shape."""

    blocks: tuple[BlockWork, ...]
    input_bytes: int
    """Bytes that flow between two blocks for one micro-batch."""
    resident_state_bytes: int
    """Bytes of the resident master parameters and optimizer state: all files."""
    resident_param_bytes: int
    """Bytes of the resident compute copy, on the device."""
    resident_elements: int
    unified: bool
    """True if the device computes in host memory (a CPU): moves between the two hand a buffer over."""
    ranks: int = 1
    """Number of processes that train together, each with its shard of all state.

    Compute copies are gathered for every pass, and gradients are summed over the ranks.
    """
    head_flop: float = 0.0
    """Floating-point operations of prologue, epilogue and loss of one micro-batch, forward and backward."""
    resident_cut: tuple[TileWork, ...] = ()
    """The tiles into which the resident state is cut; empty if it is one."""
    resident_grad_bytes: int = 0
    """Bytes of the accumulated gradients of the prologue and epilogue, on the device."""
    resident_grad_share_bytes: int = 0
    """Bytes of the resident gradients that this rank, of several, updates with."""
    resident_gather_bytes: int = 0
    """Bytes of the resident compute copy that the other ranks send."""
    resident_reduce_bytes: int = 0
    """Bytes of the resident gradients that the other ranks send."""
    resident_trained_param_bytes: int = 0
    """Bytes of the resident compute copy that an update rewrites."""
    tied_block: int | None = None
    """Number of the block, an embedding, whose parameters the last one uses too; None if all have their own."""
    update_bytes: int = 0
    """Host memory that updates take besides state, gradients and copies: for optimizers that need whole tensors."""
    expert_bytes: int = 0
    """Bytes of the experts that are on the device at once, where they are read one by one."""
    expert_staging_bytes: int = 0
    """Bytes of host memory that experts take on their way to the device."""
    expert_setup_bytes: int = 0
    """Bytes of host memory that the experts of one block take when a run begins."""
    workspace_bytes: int = 0
    """The most memory that computing one micro-batch of one block, or the epilogue, takes besides what is listed.

    It holds the activations between the block's input and its output. In device memory. Measured.
    """

    @property
    def usual_workspace_bytes(self) -> int:
        """``workspace_bytes`` of the units that take no more of it than a repeated block."""
        return self.workspace_bytes - max((block.extra_workspace_bytes for block in self.blocks), default=0)

    @property
    def resident_tiles(self) -> tuple[TileWork, ...]:
        """The tiles of the resident state, one at least."""
        if self.resident_cut:
            return self.resident_cut
        return (
            TileWork(
                elements=self.resident_elements,
                state_bytes=self.resident_state_bytes,
                grad_bytes=self.resident_grad_bytes,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TileWork:
    """A part of a unit's state that is read, updated and written by itself. Bytes."""

    elements: int
    state_bytes: int
    trained_param_bytes: int = 0
    """Bytes of the compute copy that its update rewrites."""
    grad_bytes: int = 0
    """Bytes of the gradients that its update needs."""
    rest_bytes: int = 0
    """Bytes of the state, of masters in parts, that an update reads where the compute copy is in host memory."""


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """One block of the model."""

    elements: int
    """Number of trained parameters that this process updates."""
    param_bytes: int
    """Bytes of the whole compute copy, which a forward or backward pass reads."""
    trained_param_bytes: int
    """Bytes of the compute copy that an update by this process rewrites."""
    state_bytes: int
    """Bytes of master parameters and optimizer state: all files."""
    grad_bytes: int
    """Bytes of the accumulated fp32 gradients of the whole block."""
    param_share_bytes: int | None = None
    """Bytes of the compute copy that this rank, of several, keeps and reads; None is all of it."""
    param_gather_bytes: int = 0
    """Bytes of the compute copy that the other ranks send."""
    grad_share_bytes: int | None = None
    """Bytes of the gradients that this rank updates with; None is all of them."""
    grad_reduce_bytes: int = 0
    """Bytes of this block's gradients that the other ranks send to this rank."""
    forward_flop: float = 0.0
    """Floating-point operations of one forward pass of one micro-batch."""
    backward_flop: float | None = None
    """Floating-point operations of a backward pass with its recomputation; None is three times ``forward_flop``."""
    activation_bytes: int = 0
    """Bytes that a forward pass of one micro-batch leaves for a backward pass without recomputation.

    They do not include the block's input and parameters. In device memory. Measured.
    """
    extra_workspace_bytes: int = 0
    """Bytes by which the workspace of this unit, an embedding or an epilogue, exceeds that of a repeated block.

    They are a part of ``Work.workspace_bytes``.
    """
    frozen_file_bytes: int = 0
    """Bytes of the compute copy that are read from the file of the frozen parameters; the rest is in the scratch."""
    is_split: bool = False
    """True if the files of the state hold the masters in parts, of which one is the compute copy."""
    routed_bytes: tuple[int, int] = (0, 0)
    """Bytes of experts that the forward and the backward pass read one by one, at worst; 0 in a run: not known."""
    cut: tuple[TileWork, ...] = ()
    """The tiles into which the state is cut; empty if it is one."""

    @property
    def tiles(self) -> tuple[TileWork, ...]:
        """The tiles of the state, one at least."""
        if self.cut:
            return self.cut
        return (
            TileWork(
                elements=self.elements,
                state_bytes=self.state_bytes,
                trained_param_bytes=self.trained_param_bytes,
                rest_bytes=self.state_bytes - self.trained_param_bytes if self.is_split else 0,
            ),
        )

    @property
    def kept_param_bytes(self) -> int:
        """Bytes of the compute copy that this process keeps and reads."""
        return self.param_bytes if self.param_share_bytes is None else self.param_share_bytes

    @property
    def kept_grad_bytes(self) -> int:
        """Bytes of the gradients that this process updates with."""
        return self.grad_bytes if self.grad_share_bytes is None else self.grad_share_bytes

    @property
    def backward_work(self) -> float:
        """Floating-point operations of a backward pass with its recomputation."""
        return 3 * self.forward_flop if self.backward_flop is None else self.backward_flop


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The shape of a step. ``micro_batches`` and ``commit`` may differ from step to step."""

    micro_batches: int
    clipping: ClippingMode = "none"
    """The way in which gradients are clipped.

    ``defer``: updates wait for the norm of all gradients. ``speculate``: updates do not wait, and are made again where
    the norm is not as guessed, from the state of the step before, which must be a commit. ``per_block``: a block's
    gradients are clipped by themselves, so nothing waits.
    """
    order: str = "plain"
    """Order of the micro-batches through a block of the vertical schedule (``micro_batches`` below)."""
    delayed_fraction: float = 0.0
    """Fraction of the blocks of the vertical schedule that are updated beside the next forward pass.

    With ``defer`` all are.
    """
    recomputed_fraction: float = 1.0
    """Fraction of the blocks before the last that are computed again in the backward pass.

    What the forward pass of the others has computed stays on the device until then, and so do their parameters.
    """
    commit: bool = True
    """True if the step ends in a commit."""

    @property
    def keeps_grads(self) -> bool:
        """True if gradients of every block wait for the end of the backward pass."""
        return self.clipping in ("defer", "speculate")


@dataclass(frozen=True)
class MemorySaving:
    """The savings of memory that cost a step time."""

    grad_slots: int = 2
    """Blocks whose gradients are in memory at once, unless they stay: being summed, being consumed.

    With 1 a block's backward pass waits until the gradients before it have been handed over, or used.
    """
    resident_state: bool = True
    """True if the optimizer state of what lies outside the blocks stays in host memory."""
    keeps_copies: bool = True
    """True if a compute copy that is a part of the masters stays in host memory from the backward pass to the update.

    Otherwise an update reads it again.
    """
    loads_ahead: bool = True
    """True if a compute copy is read while the one before it is in use, and states while a backward pass computes.

    Otherwise one copy and two states are in memory at once, and no state beside a computation that takes much more
    memory than a block (``StepBuilder.workspace``). Only where the device computes in host memory.
    """

    inputs_stay: bool = True
    """True if small block inputs may stay on a separate device (``step_builder.inputs_stay_on_device``)."""

    def describe(self) -> list[str]:
        """Return what is done to save memory, as texts for a person."""
        one = [] if self.keeps_copies else ["compute copies that updates read again"]
        one += ["one buffer for gradients"] if self.grad_slots == 1 else []
        one += [] if self.resident_state else ["optimizer state outside the blocks on the SSD"]
        return one + ([] if self.loads_ahead else ["nothing read ahead"])


FASTEST, LEAST_MEMORY = MemorySaving(), MemorySaving(1, False, False, False, False)
MEMORY_SAVINGS = (
    FASTEST,
    *(
        MemorySaving(grad_slots, resident_state, keeps_copies, inputs_stay=False)
        for resident_state in (True, False)
        for grad_slots in (2, 1)
        for keeps_copies in (True, False)
    ),
    MemorySaving(1, False, True, False, False),
    LEAST_MEMORY,
)
"""The fastest first, and last the one that takes least memory."""


@dataclass(frozen=True, kw_only=True)
class BlockPlacement:
    """The parts of each block that stay in host memory. The rest lives on the SSD."""

    params: tuple[bool, ...]
    optimizer: tuple[bool, ...]
    activations: tuple[bool, ...]
    gradients: tuple[bool, ...]
    """Matters only while gradients wait for the end of the backward pass (clipping, horizontal order)."""
    saving: MemorySaving = FASTEST

    def loads_ahead(self, work: Work) -> bool:
        """Return whether compute copies and states are read before they are needed (``MemorySaving.loads_ahead``)."""
        return self.saving.loads_ahead or not work.unified

    def reads_state(self, work: Work, block: int) -> bool:
        """Return whether passes over ``block`` read the compute copy from the files of its state.

        That takes masters in parts, and state that every step writes. Where the state stays in host memory, a step
        that does not commit writes the copy alone.
        """
        return work.blocks[block].is_split and not (self.params[block] or self.optimizer[block])

    def scratch_bytes(self, work: Work) -> list[int]:
        """Return the bytes of each block's compute copy in the SSD scratch, by block."""
        return [
            0
            if self.params[number]
            else block.kept_param_bytes
            - block.frozen_file_bytes
            - (block.trained_param_bytes if self.reads_state(work, number) else 0)
            for number, block in enumerate(work.blocks)
        ]

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the blocks that stays in host memory, by kind; for inputs, of all blocks but the last."""
        stays = {kind: getattr(self, kind) for kind in KINDS}
        if len(stays["activations"]) > 1:
            stays["activations"] = stays["activations"][:-1]
        return {kind: sum(which) / len(which) for kind, which in stays.items()}

    def describe(self) -> str:
        """Return the placement as text for a person."""
        shares = self.shares
        stays = ", ".join(f"{shares[kind]:.0%} of {noun}" for kind, noun in NOUNS.items())
        return "; ".join([f"{stays} in host memory", *self.saving.describe()])

    @classmethod
    def fractions(
        cls,
        count: int,
        *,
        params: float = 0.0,
        optimizer: float = 0.0,
        activations: float = 1.0,
        gradients: float = 1.0,
    ) -> BlockPlacement:
        """Return a placement of whole blocks, as near to each fraction as ``count`` blocks allow.

        The first to stay are those with the least time until they are needed again: block 0, which is updated last and
        runs first, and the inputs of the last blocks. The last block's own inputs never leave.
        """
        return cls(
            params=spread(count, params)[::-1],
            optimizer=spread(count, optimizer)[::-1],
            activations=(*spread(count - 1, activations), True),
            gradients=spread(count, gradients)[::-1],
        )


@lru_cache(maxsize=64)  # a list of tens of thousands of operations asks for each
def spread(count: int, fraction: float) -> tuple[bool, ...]:
    """Return for each of ``count`` blocks whether it is among the chosen ``fraction`` of them.

    They are spread evenly, so that every lane sees an even load. The last block is the first to be chosen.

    >>> spread(4, 0.5), spread(4, 0.25)
    ((False, True, False, True), (False, False, False, True))
    """
    chosen = round(fraction * count)
    return tuple((i + 1) * chosen // count > i * chosen // count for i in range(count))


ORDERS = ("plain", "snake")


def micro_batches(shape: StepShape, block: int) -> Sequence[int]:
    """Return the micro-batches in the order in which they go through ``block``.

    >>> list(micro_batches(StepShape(micro_batches=3, order="snake"), 1))
    [2, 1, 0]
    """
    ascending = range(shape.micro_batches)
    return ascending[::-1] if shape.order == "snake" and block % 2 else ascending


def delayed_blocks(shape: StepShape, count: int) -> tuple[bool, ...]:
    """Return for each of ``count`` blocks whether it is updated beside the next forward pass.

    The last block is the first to be chosen, because its parameters are needed last.

    >>> delayed_blocks(StepShape(micro_batches=1, delayed_fraction=0.5), 4)
    (False, True, False, True)
    """
    return spread(count, shape.delayed_fraction)


def kept_blocks(shape: StepShape, count: int) -> tuple[bool, ...]:
    """Return for each of ``count`` blocks whether its activations stay from its forward to its backward pass.

    The last block has no forward pass of its own.

    >>> kept_blocks(StepShape(micro_batches=1, recomputed_fraction=0.75), 5)
    (False, False, False, True, False)
    """
    return (*spread(count - 1, 1 - shape.recomputed_fraction), False)
