"""Work: what a model's step consists of, as numbers; and where its bytes live.

Sizes are bytes as they are moved, page-rounded where the SSD is concerned, so that traffic computed from
them is exact. ``Work`` is what the engine measures from a model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Clipping = Literal["none", "defer", "speculate", "per_block"]
"""When updates know the factor that clips their gradients (``docs/schedule.md``)."""

CLIPPING = ("none", "defer", "speculate", "per_block")


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """One block of the model."""

    elements: int
    """Trained parameters that this process updates."""
    param_bytes: int
    """The whole working copy in the compute dtype: what a forward or backward pass reads."""
    trained_param_bytes: int
    """The part of it that an update rewrites, by this process."""
    state_bytes: int
    """Master parameters and optimizer state: the whole file, and the buffer that holds it."""
    grad_bytes: int
    """Accumulated gradients, fp32, of the whole block."""
    param_share_bytes: int | None = None
    """Of several ranks, what this one keeps and reads of the working copy; None is all of it."""
    param_gather_bytes: int = 0
    """What the others send of it."""
    grad_share_bytes: int | None = None
    """The part of the gradients that this rank updates with; None is all of them."""
    grad_reduce_bytes: int = 0
    """What the others send of theirs."""
    forward_flop: float = 0.0
    """Floating-point operations of one forward pass of one micro-batch."""
    backward_flop: float | None = None
    """Of a backward pass with its recomputation; None is three times as many."""
    activation_bytes: int = 0
    """What a forward pass of one micro-batch leaves for a backward pass that does not compute it again, besides the
    block's input and parameters. In device memory. Measured."""

    @property
    def kept_param_bytes(self) -> int:
        """What this process keeps and reads of the working copy."""
        return self.param_bytes if self.param_share_bytes is None else self.param_share_bytes

    @property
    def kept_grad_bytes(self) -> int:
        """What this process updates with."""
        return self.grad_bytes if self.grad_share_bytes is None else self.grad_share_bytes

    @property
    def backward_work(self) -> float:
        """Floating-point operations of a backward pass with its recomputation."""
        return 3 * self.forward_flop if self.backward_flop is None else self.backward_flop


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of one model with micro-batches of one shape."""

    blocks: tuple[BlockWork, ...]
    input_bytes: int
    """What flows between two blocks for one micro-batch."""
    resident_state_bytes: int
    """Master parameters and optimizer state of the prologue and epilogue, in host memory: the whole file."""
    resident_param_bytes: int
    """Their working copy, on the device."""
    resident_elements: int
    unified: bool
    """The device computes in host memory (a CPU): moves between the two hand a buffer over."""
    ranks: int = 1
    """Processes that train together, each with its share of all state: working copies are gathered for every pass, and
    gradients are summed over them."""
    head_flop: float = 0.0
    """Prologue, epilogue and loss of one micro-batch, forward and backward."""
    resident_grad_bytes: int = 0
    """Accumulated gradients of the prologue and epilogue, on the device."""
    resident_grad_share_bytes: int = 0
    """Of several ranks, what this one updates with."""
    resident_gather_bytes: int = 0
    """What the others send of the resident working copy, and ..."""
    resident_reduce_bytes: int = 0
    """... of its gradients."""
    resident_trained_param_bytes: int = 0
    """The part of their working copy that an update rewrites; matters only to the zeroth-order step."""
    update_bytes: int = 0
    """What updates take besides state, gradients and copies, in host memory: of optimizers that need whole tensors."""
    workspace_bytes: int = 0
    """The most that computing one micro-batch of one block, or the epilogue, takes besides what is listed as
    held: activations between the block's input and its output. In device memory. Measured."""


def spread(count: int, fraction: float) -> tuple[bool, ...]:
    """Which of ``count`` blocks make up ``fraction`` of them, spread evenly so that every lane sees an even
    load. The last block is the first to be chosen.

    >>> spread(4, 0.5), spread(4, 0.25)
    ((False, True, False, True), (False, False, False, True))
    """
    chosen = round(fraction * count)
    return tuple((i + 1) * chosen // count > i * chosen // count for i in range(count))


NOUNS = {"params": "parameters", "optimizer": "optimizer state", "activations": "block inputs"}
"""What stays on the host or does not, for a person."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Per block: what stays in host memory. The rest lives on the SSD."""

    params: tuple[bool, ...]
    optimizer: tuple[bool, ...]
    activations: tuple[bool, ...]
    gradients: tuple[bool, ...]
    """Matters only while gradients wait for the end of the backward pass (clipping, horizontal order)."""

    @property
    def shares(self) -> dict[str, float]:
        """Of the blocks, in host memory; of the inputs of all but the last."""
        stays = {each.name: getattr(self, each.name) for each in fields(self)}
        if len(stays["activations"]) > 1:
            stays["activations"] = stays["activations"][:-1]
        return {kind: sum(which) / len(which) for kind, which in stays.items()}

    def said(self) -> str:
        """For a person."""
        shares = self.shares
        stays = ", ".join(f"{shares[kind]:.0%} of {noun}" for kind, noun in NOUNS.items())
        return f"{stays} in host memory"

    @classmethod
    def fractions(
        cls,
        count: int,
        *,
        params: float = 0.0,
        optimizer: float = 0.0,
        activations: float = 1.0,
        gradients: float = 1.0,
    ) -> Placement:
        """Whole blocks, as near to each fraction as ``count`` blocks allow. The first to stay are those with
        the least time between leaving and being wanted again: block 0, which is updated last and runs first,
        and the inputs of the last blocks. The last block's own inputs never leave."""
        return cls(
            params=spread(count, params)[::-1],
            optimizer=spread(count, optimizer)[::-1],
            activations=(*spread(count - 1, activations), True),
            gradients=spread(count, gradients)[::-1],
        )


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """How a step goes. The first and the last may vary from step to step."""

    micro_batches: int
    clipping: Clipping = "none"
    """``defer``: updates wait for the norm of all gradients; ``speculate``: they do not, and are done again where it
    says otherwise, from the state of the step before, which must be a commit; ``per_block``: a block's gradients are
    clipped by themselves, so nothing waits."""
    order: str = "plain"
    """Which way micro-batches go through a block of the vertical schedule (``orders.py``)."""
    delayed_fraction: float = 0.0
    """Of the blocks of the vertical schedule: those that are updated beside the next forward pass. With ``defer``
    all are."""
    recomputed_fraction: float = 1.0
    """Of the blocks before the last: those that are computed again in the backward pass. What the forward pass of the
    others has computed stays on the device until then, and so do their parameters."""
    commit: bool = True
    """The step ends in a commit."""

    @property
    def keeps_grads(self) -> bool:
        """Gradients of every block wait for the end of the backward pass."""
        return self.clipping in ("defer", "speculate")
