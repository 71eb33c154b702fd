"""A model that is frozen under trained adapters, and the formats in which the frozen linear layers are stored.

Every linear layer of every block has an adapter of rank R (LoRA): two matrices, inputs x R and R x outputs. Adapters
alone are trained. The weights of these layers are stored and read in the format of the base; while a block computes,
one of them at a time is unpacked to 16 bits on the device. Biases, norms, experts, embedding and head are frozen in 16
bits.
The planner takes an ``AdaptedModel`` where it takes a ``ModelProfile``. The planning commands make it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .profile_types import LinearLayer, ModelProfile, RoutedExperts

FROZEN_BYTES = 2
"""Bytes of a frozen parameter in 16 bits."""


@dataclass(frozen=True)
class BaseFormat:
    """The format in which frozen weights of linear layers are stored."""

    name: str
    bits: int
    """Bits of one weight, without scales."""
    scale_bytes: Callable[[LinearLayer], int]
    """Returns the bytes of the scales of one layer."""

    def layer_bytes(self, layer: LinearLayer) -> int:
        """Return the bytes of the weight of ``layer`` as it is stored, with its scales."""
        return -(-layer.elements * self.bits // 8) + self.scale_bytes(layer)


def _no_scales(layer: LinearLayer) -> int:
    return 0


def _tile_scales(layer: LinearLayer) -> int:
    """Return the bytes of an fp32 scale for each tile of 128 x 128 elements."""
    return 4 * -(-layer.inputs // 128) * -(-layer.outputs // 128)


def _row_scales(layer: LinearLayer) -> int:
    """Return the bytes of an fp32 scale for each output, as bitsandbytes has them in 8 bits."""
    return 4 * layer.outputs


def _double_scales(layer: LinearLayer) -> int:
    """Return the bytes of a one-byte scale for 64 elements, and of an fp32 scale for 256 of those scales.

    bitsandbytes calls this double quantisation.
    """
    scales = -(-layer.elements // 64)
    return scales + 4 * -(-scales // 256)


BASES = {
    base.name: base
    for base in (
        BaseFormat("bf16", 16, _no_scales),
        BaseFormat("fp8", 8, _tile_scales),
        BaseFormat("int8", 8, _row_scales),
        BaseFormat("nf4", 4, _double_scales),
    )
}
"""The formats of a base, by name."""


@dataclass(frozen=True, kw_only=True)
class AdaptedModel:
    """A decoder, frozen under adapters of ``rank`` on all linear layers of its blocks, and one micro-batch of it."""

    profile: ModelProfile
    """The model without adapters."""
    rank: int
    base: BaseFormat = BASES["bf16"]
    expert_slots: int = 0
    """Number of experts in memory at once, each read where a token is routed to it; 0 if blocks have all of theirs."""
    resident_parameters = table_parameters = 0
    """Nothing is trained outside of the blocks, so no embedding is streamed."""
    tied = False

    @property
    def description(self) -> str:
        return f"{self.profile.description}, with adapters of rank {self.rank} on a base in {self.base.name}"

    @property
    def blocks(self) -> int:
        return self.profile.blocks

    @cached_property
    def trained_block_parameters(self) -> int:
        """The parameters of the adapters of one block."""
        return sum(self.rank * (layer.inputs + layer.outputs) for layer in self.profile.linear_layers)

    @property
    def adapter_parameters(self) -> int:
        """The parameters of all adapters."""
        return self.blocks * self.trained_block_parameters

    @property
    def parameters(self) -> int:
        """The parameters of the whole model, without adapters."""
        return self.profile.parameters

    @cached_property
    def linear_bytes(self) -> int:
        """The bytes of the weights of the linear layers of one block, as they are stored."""
        return sum(self.base.layer_bytes(layer) for layer in self.profile.linear_layers)

    @property
    def weight_bits(self) -> float:
        """The mean bits of a weight of the linear layers, with its part of the scales."""
        return 8 * self.linear_bytes / self.profile.linear_parameters

    @cached_property
    def frozen_block_bytes(self) -> int:
        """The bytes of the frozen parameters of one block, as they are stored, without ``routed`` experts."""
        others = self.profile.block_parameters - self.profile.linear_parameters
        return self.linear_bytes + FROZEN_BYTES * others - self.routed.count * self.routed.nbytes

    @cached_property
    def routed(self) -> RoutedExperts:
        """The experts that are read one by one, in 16 bits."""
        if not self.expert_slots:
            return RoutedExperts()
        nbytes = FROZEN_BYTES * self.profile.expert_parameters
        return RoutedExperts(self.profile.experts, nbytes, self.expert_slots)

    @property
    def frozen_resident_bytes(self) -> int:
        """The bytes of the embedding, the last norm and the head."""
        return FROZEN_BYTES * self.profile.resident_parameters

    @property
    def unpacked_bytes(self) -> int:
        """The bytes of the largest linear layer's weight in 16 bits; 0 for a base that is in 16 bits."""
        if self.base.bits == 16:
            return 0
        return FROZEN_BYTES * max(layer.elements for layer in self.profile.linear_layers)

    @property
    def tokens(self) -> int:
        """The tokens of one micro-batch."""
        return self.profile.tokens

    @property
    def micro_batch(self) -> int:
        return self.profile.micro_batch

    @property
    def sequence(self) -> int:
        return self.profile.sequence

    @property
    def input_elements(self) -> int:
        """The elements that flow between two blocks for one micro-batch."""
        return self.profile.input_elements

    @property
    def forward_flop(self) -> float:
        """The operations of one forward pass of one block over one micro-batch, without unpacking."""
        return self.profile.forward_flop + 2.0 * self.trained_block_parameters * self.tokens

    @property
    def backward_flop(self) -> float:
        """The operations of one backward pass of one block, with the recomputation.

        Frozen parameters have no gradients, which saves a third of their products.
        """
        return 3 * self.forward_flop - 2.0 * self.profile.used_block_parameters * self.tokens

    @property
    def head_flop(self) -> float:
        """The operations of head and loss for one micro-batch, forward and backward, without gradients of the head."""
        return self.profile.head_flop * 2 / 3

    @property
    def streamed_head_flop(self) -> float:
        """The same as ``head_flop``: the head stays."""
        return self.head_flop

    def workspace_bytes(self, value_bytes: int, streams_head: bool = False) -> int:
        """Return an estimate of the activation bytes of one micro-batch in the last block, and in the head and loss.

        It includes one unpacked weight and, for each adapter, R elements a token. A frozen head stays, and has no
        gradients.
        """
        adapters = value_bytes * self.tokens * self.rank * len(self.profile.linear_layers)
        activations = self.profile.activation_bytes(value_bytes) + adapters
        return activations + self.unpacked_bytes + self.profile.logits_bytes(value_bytes)
