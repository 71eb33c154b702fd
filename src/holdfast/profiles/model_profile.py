"""The profile of a model: equal transformer blocks between an embedding and a head, and its micro-batches.

The sizes determine the parameters, the floating-point operations and the activations between blocks. A multiplication
and an addition are two operations; attention counts every pair of tokens, masked or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from .profile_keys import key

ACTIVATION_BYTES = 34
"""The activation bytes of one block, per token and unit of width, that a backward pass needs.

They are in 16 bits with fused attention.
"""

LOGIT_BYTES = 16
"""The bytes per token and word of the vocabulary.

They hold logits in 16 and 32 bits, their probabilities and their gradients.
"""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A decoder, and one micro-batch of it."""

    description: str = key("description", "text", "what it is, for a person")
    blocks: int = key("blocks", "count", "equal ones")
    width: int = key("width", "count", "of the stream between them")
    heads: int = key("heads", "count", "of queries")
    kv_heads: int = key("kv_heads", "count", "of keys and values; 0 is as many as heads", 0)
    head_size: int = key("head_size", "count", "of one head; 0 is width / heads", 0)
    hidden: int = key("hidden", "count", "width of the MLP; 0 is 4 times the stream's", 0)
    gated: bool = key("gated", "flag", "the MLP has three matrices instead of two", False)
    biases: bool = key("biases", "flag", "matrices and norms have biases", False)
    vocabulary: int = key("vocabulary", "count", "tokens")
    tied: bool = key("tied", "flag", "embedding and head are one matrix", False)
    positions: int = key("positions", "count", "learned position embeddings", 0)
    sequence: int = key("sequence", "count", "tokens of one sequence", 2048)
    micro_batch: int = key("micro_batch", "count", "sequences of one micro-batch", 1)

    def __post_init__(self) -> None:
        for name in ("blocks", "width", "heads", "vocabulary", "sequence", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not self.head_size and self.width % self.heads:
            raise ValueError(
                f"width = {self.width} does not divide into heads = {self.heads}; give head_size"
            )

    @property
    def block_parameters(self) -> int:
        """The parameters of one block."""
        queries = self.heads * self._head_size
        keys = (self.kv_heads or self.heads) * self._head_size
        matrices = 2 * self.width * (queries + keys) + (3 if self.gated else 2) * self.width * self._hidden
        biases = queries + 2 * keys + self._hidden + 2 * self.width
        return matrices + 2 * self.width + (biases + 2 * self.width) * self.biases

    @property
    def trained_block_parameters(self) -> int:
        """The trained parameters of one block, which are all of them."""
        return self.block_parameters

    @property
    def resident_parameters(self) -> int:
        """The parameters of the embedding, the last norm and the head."""
        tables = self.vocabulary * (1 if self.tied else 2) + self.positions
        return (tables + 1 + self.biases) * self.width

    @property
    def parameters(self) -> int:
        """The parameters of the whole model."""
        return self.blocks * self.block_parameters + self.resident_parameters

    @property
    def tokens(self) -> int:
        """The tokens of one micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def input_elements(self) -> int:
        """The elements that flow between two blocks for one micro-batch."""
        return self.tokens * self.width

    @property
    def forward_flop(self) -> float:
        """The operations of one forward pass of one block over one micro-batch."""
        attention = 4.0 * self.tokens * self.sequence * self.heads * self._head_size
        return 2.0 * self.block_parameters * self.tokens + attention

    @property
    def backward_flop(self) -> float:
        """The operations of one backward pass of one block over one micro-batch, with the recomputation."""
        return 3 * self.forward_flop

    @property
    def workspace_bytes(self) -> int:
        """An estimate of the activation bytes of one micro-batch in one block, or in the head and the loss."""
        block = ACTIVATION_BYTES * self.tokens * self.width
        return max(block, LOGIT_BYTES * self.tokens * self.vocabulary)

    @property
    def head_flop(self) -> float:
        """The operations of head and loss for one micro-batch, forward and backward."""
        return 6.0 * self.vocabulary * self.width * self.tokens

    @property
    def _head_size(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def _hidden(self) -> int:
        return self.hidden or 4 * self.width
