"""The setting of a plan: a model, a machine and a way of training, with the numbers for its formulas.

Symbols of the papers: n -> blocks, M -> micro_batches, P -> elements of a block, S d -> input_bytes, alpha ->
delayed_fraction, theta -> update_elements_per_second. Bytes, seconds, floating-point operations. ``Affine`` expressions
are written like numbers and become rows of the linear program. ``Duplex`` is the time for moving bytes two ways at
once, on an SSD or a bus, interpolated between one way alone and both in equal parts. Called by ``formulas`` and the
linear program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Literal

from ...profiles import AdaptedModel, MachineProfile, ModelProfile, Precision, RoutedExperts
from ..work import CLIPPING, EXPERTS_AHEAD, FASTEST, ClippingMode, MemorySaving, Work, tile_count

CARRY_BYTES = 1 / 8
"""Bytes of the carry of one master in parts."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """The way of training: clipping, commits, order, and bytes per parameter."""

    clipping: ClippingMode = "none"
    """The way in which gradients are clipped.

    ``defer``: every update waits for the norm, in the next forward pass. ``speculate``: updates may be undone, so
    gradients are kept until the norm is known. ``per_block`` moves as many bytes as ``none``.
    """
    commit_every: int = 1
    """Steps from one commit to the next; 0 is none."""
    retain: int = 2
    """Number of newest whole steps kept; at least 1."""
    order: Literal["plain", "snake"] = "plain"
    param_bytes: int = 2
    """Bytes of one parameter on the device."""
    grad_bytes: int = 4
    state_bytes: float = 12
    """Bytes of one trained parameter's master and optimizer state, without the carry of a master in parts."""
    is_split: bool = False
    """True if masters of blocks are stored in parts, of which one is the compute copy (``state/split_masters``)."""
    streams_all: bool = False
    """True if embedding and head come and go as blocks do, each by itself; False if they stay on the device."""
    least_steps: int = 0
    """Number of steps that the SSDs must live for; 0 is any number."""

    def __post_init__(self) -> None:
        if self.clipping not in CLIPPING:
            raise ValueError(f"clipping is {' or '.join(CLIPPING)}, not {self.clipping!r}")
        if self.order not in ("plain", "snake"):
            raise ValueError(f"order is plain or snake, not {self.order!r}")

    @property
    def precision(self) -> Precision:
        """The dtype of compute copies and activations, where bf16 stands for 16 bits."""
        return "fp32" if self.param_bytes == 4 else "bf16"

    @property
    def delayed(self) -> float | None:
        """The delayed fraction, if clipping leaves no choice; otherwise None."""
        return 1.0 if self.clipping == "defer" else None

    @property
    def keeps_all_gradients(self) -> bool:
        """True if all gradients are kept until the norm is known."""
        return self.clipping in ("defer", "speculate")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One step, except the placement."""

    machine: MachineProfile
    model: PlannedModel
    method: Method = field(default_factory=Method)
    micro_batches: int
    delayed_fraction: float = 0.0
    saving: MemorySaving = FASTEST

    @property
    def blocks(self) -> int:
        return self.model.blocks

    @property
    def tokens(self) -> int:
        """Number of tokens of one step."""
        return self.micro_batches * self.model.tokens

    @property
    def tables(self) -> int:
        """Number of elements of the embedding, and of the head, if they are streamed; 0 if they stay."""
        return self.model.table_parameters if self.method.streams_all else 0

    @property
    def num_tables(self) -> int:
        """Number of streamed tables: embedding and head, which are one if the model ties them."""
        return (2 - self.model.tied) * bool(self.tables)

    @property
    def tied_elements(self) -> int:
        """Number of elements of the streamed embedding that is the head as well; 0 if there is none."""
        return self.tables * self.model.tied

    @property
    def units(self) -> int:
        """Number of blocks, with embedding and epilogue if they are streamed."""
        return self.blocks + 2 * bool(self.tables)

    @cached_property
    def elements(self) -> int:
        """Number of trained elements of one block, with its part of a streamed embedding and head."""
        return round(self.model.trained_block_parameters + self.num_tables * self.tables / self.blocks)

    @cached_property
    def largest_elements(self) -> int:
        """Number of trained elements of the largest unit."""
        return max(self.model.trained_block_parameters, self.tables)

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of one block that a pass reads: the compute copy, of frozen parameters as they are stored."""
        return self.trained_param_bytes + self.model.frozen_block_bytes

    @property
    def trained_param_bytes(self) -> int:
        """Bytes of one block's parameters that an update writes."""
        return self.elements * self.method.param_bytes

    @property
    def largest_param_bytes(self) -> int:
        """Bytes of the largest unit that a pass reads."""
        return self.largest_elements * self.method.param_bytes + self.model.frozen_block_bytes

    @cached_property
    def grad_bytes(self) -> int:
        return self.elements * self.method.grad_bytes

    @property
    def largest_grad_bytes(self) -> int:
        """Bytes of the gradients of the largest unit, except a tied embedding, which has a buffer of its own."""
        elements = self.model.trained_block_parameters if self.tied_elements else self.largest_elements
        return elements * self.method.grad_bytes

    @property
    def tied_param_bytes(self) -> int:
        """Bytes of the compute copy of a tied embedding, which the pass of the head brings once more."""
        return self.tied_elements * self.method.param_bytes

    @property
    def tied_grad_bytes(self) -> int:
        """Bytes of the gradients of a tied embedding."""
        return self.tied_elements * self.method.grad_bytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of activations that computing takes at once."""
        return self.model.workspace_bytes(self.method.param_bytes, bool(self.tables))

    @property
    def state_bytes_each(self) -> float:
        """Bytes of one trained parameter's state in a block: of a master in parts, with its carry."""
        return self.method.state_bytes + CARRY_BYTES * self.method.is_split

    @cached_property
    def state_bytes(self) -> int:
        return round(self.elements * self.state_bytes_each)

    @property
    def holds_copies(self) -> bool:
        """True if a compute copy stays from the backward pass to an update soon after, which reads the rest."""
        return self.method.is_split and self.saving.keeps_copies and self.method.clipping != "defer"

    @cached_property
    def tiles(self) -> int:
        """Number of tiles in which a block's state is updated."""
        return tile_count(self.state_bytes)

    @property
    def resident_state_bytes(self) -> int:
        """Bytes of the state of what lies outside the blocks."""
        return round(self.resident_elements * self.method.state_bytes)

    @property
    def input_bytes(self) -> int:
        return self.model.input_elements * self.method.param_bytes

    @cached_property
    def resident_elements(self) -> int:
        """Number of trained elements of the prologue and epilogue, which stay."""
        return self.model.resident_parameters - self.num_tables * self.tables

    @property
    def slot_bytes(self) -> int:
        """Bytes of the experts that are on the device at once, where they are read one by one."""
        routed = self.model.routed
        return min(routed.slots, routed.count * self.blocks) * routed.nbytes

    @property
    def slot_staging_bytes(self) -> int:
        """Bytes of host memory that experts take on their way to a separate device."""
        routed, shares = self.model.routed, self.machine.device_shares_host
        return 0 if shares else min(routed.slots, 1 + EXPERTS_AHEAD) * routed.nbytes

    @property
    def flop_per_second(self) -> float:
        """Floating-point operations per second attained in a run."""
        return self.machine.device_flop_per_second / self.machine.compute_factor

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward of one micro-batch through one block."""
        return self.model.forward_flop / self.flop_per_second

    @property
    def backward_seconds(self) -> float:
        """Seconds of the backward of one micro-batch through one block, with the recomputation."""
        return self.model.backward_flop / self.flop_per_second

    @property
    def head_flop(self) -> float:
        """Floating-point operations of head and loss of one micro-batch."""
        return self.model.streamed_head_flop if self.tables else self.model.head_flop

    @property
    def head_seconds(self) -> float:
        return self.head_flop / self.flop_per_second

    @cached_property
    def ssd(self) -> Duplex:
        return ssd_of(self.machine)

    @cached_property
    def bus(self) -> Duplex:
        return bus_of(self.machine)


@dataclass(frozen=True)
class MeasuredModel:
    """Equal blocks, each the mean of the blocks that were measured."""

    work: Work
    description: str = "the model at hand"
    tokens: int = 1
    micro_batch: int = 1
    sequence: int = 1
    """Tokens, micro-batch and sequence are not known; no choice depends on them."""
    tied = False
    """No proposal counts the copies of a tied embedding; the check of a proposal does."""
    table_parameters = frozen_resident_bytes = 0
    """A streamed embedding or head is among the blocks. The check of a proposal counts what is frozen beside them."""
    routed = RoutedExperts()
    """No proposal counts experts that are read one by one: which are read is not known."""

    @cached_property
    def blocks(self) -> int:
        return len(self.work.blocks)

    @cached_property
    def trained_block_parameters(self) -> int:
        return round(self._mean("elements"))

    @cached_property
    def frozen_block_bytes(self) -> int:
        parameters = round(self._mean("param_bytes") / self.param_bytes_each)
        return (parameters - self.trained_block_parameters) * self.param_bytes_each

    @property
    def resident_parameters(self) -> int:
        return self.work.resident_elements

    @property
    def input_elements(self) -> int:
        return self.work.input_bytes // self.param_bytes_each

    @cached_property
    def forward_flop(self) -> float:
        return self._mean("forward_flop")

    @cached_property
    def backward_flop(self) -> float:
        return self._mean("backward_work")

    @property
    def head_flop(self) -> float:
        return self.work.head_flop

    @property
    def streamed_head_flop(self) -> float:
        return self.work.head_flop

    def workspace_bytes(self, value_bytes: int, streams_head: bool) -> int:
        return self.work.workspace_bytes

    @cached_property
    def is_split(self) -> bool:
        """True if masters are stored in parts, of which one is the compute copy."""
        return any(block.is_split for block in self.work.blocks)

    @cached_property
    def param_bytes_each(self) -> int:
        """Bytes of one parameter on the device."""
        trained = self._mean("elements")
        return max(round(self._mean("trained_param_bytes") / trained), 1) if trained else 2

    @cached_property
    def state_bytes_each(self) -> float:
        """Bytes of one trained parameter's master and optimizer state."""
        trained = self._mean("elements")
        return self._mean("state_bytes") / trained if trained else 0.0

    def _mean(self, what: str) -> float:
        return sum(getattr(block, what) for block in self.work.blocks) / len(self.work.blocks)


PlannedModel = ModelProfile | AdaptedModel | MeasuredModel
"""Equal blocks, and one micro-batch of them: a profile, one under adapters, or what the engine measured."""


def ssd_of(machine: MachineProfile) -> Duplex:
    """Return the rates of all SSDs together; ``one`` is reading."""
    mixed, count = machine.ssd_mixed_bytes_per_second, machine.ssd_count
    return Duplex(
        one=machine.ssd_read_bytes_per_second * count,
        other=machine.ssd_write_bytes_per_second * count,
        mixed=mixed * count if mixed else None,
    )


def bus_of(machine: MachineProfile) -> Duplex:
    """Return the rates of the bus; ``one`` is towards the device. Computing in host memory needs no bus."""
    if machine.device_shares_host:
        return Duplex()
    up, down = machine.upload_bytes_per_second, machine.download_bytes_per_second
    return Duplex(one=up or inf, other=down or inf, mixed=machine.copy_bytes_per_second)


@dataclass(frozen=True)
class Affine:
    """A constant plus multiples of named unknowns: ``constant + sum(terms[name] * name)``.

    >>> bytes_read = 10 * (1 - Affine.of("kept")) + 5
    >>> bytes_read({"kept": 0.25}), bytes_read.least
    (12.5, 5.0)
    """

    constant: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> Affine:
        """Return the unknown ``name``."""
        return cls(0.0, {name: 1.0})

    def __add__(self, other: Affine | float) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.constant + other, self.terms)
        terms = dict(self.terms)
        for name, value in other.terms.items():
            terms[name] = terms.get(name, 0.0) + value
        return Affine(self.constant + other.constant, terms)

    def __mul__(self, factor: float) -> Affine:
        return Affine(self.constant * factor, {name: value * factor for name, value in self.terms.items()})

    def __truediv__(self, divisor: float) -> Affine:
        return self * (1 / divisor)

    def __neg__(self) -> Affine:
        return self * -1.0

    def __sub__(self, other: Affine | float) -> Affine:
        return self + -other

    def __rsub__(self, other: float) -> Affine:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __call__(self, values: Mapping[str, float]) -> float:
        """Return the value for given unknowns."""
        return self.constant + sum(value * values[name] for name, value in self.terms.items())

    @property
    def least(self) -> float:
        """The smallest value, for unknowns that lie between 0 and 1."""
        return self.constant + sum(min(value, 0.0) for value in self.terms.values())


@dataclass(frozen=True, kw_only=True)
class Duplex:
    """The rates of two ways. ``mixed`` is the sum of both, measured with as much one way as the other.

    >>> Duplex(one=4.0, other=2.0).seconds(8, 8), Duplex(one=4.0, other=2.0, mixed=4.0).seconds(8, 8)
    (6.0, 4.0)
    """

    one: float = inf
    other: float = inf
    mixed: float | None = None

    def rows(self, one: Affine, other: Affine) -> list[Affine]:
        """Return the seconds for ``one`` and ``other`` bytes, as rows whose largest value counts.

        A device on which the ways help each other has two rows. On one where they slow each other down (as reads do
        beside writes), each byte takes the longer time of the equal mixture, whatever the mixture, which is a careful
        estimate.
        """
        turns = 1 / self.one + 1 / self.other
        both = turns if self.mixed is None else 2 / self.mixed
        if both >= turns:
            slower = both / turns if turns else 1.0
            return [one * (slower / self.one) + other * (slower / self.other)]
        return [(one - other) / self.one + other * both, (other - one) / self.other + one * both]

    def seconds(self, one: float, other: float) -> float:
        """Return the seconds for ``one`` and ``other`` bytes."""
        return max(row({}) for row in self.rows(Affine(one), Affine(other)))

    def slowdown(self, one: float, other: float) -> float:
        """Return ``seconds`` divided by the time of ways that take turns, for the same bytes."""
        turns = one / self.one + other / self.other
        return self.seconds(one, other) / turns if turns else 1.0
