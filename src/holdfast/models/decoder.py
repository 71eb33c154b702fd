"""The reference language model: a Llama in one file.

Tokens are embedded, pass through a list of equal blocks (attention, then a gated MLP, each added to a residual stream),
and are scored against the vocabulary. Nothing here knows about offloading: the blocks are a plain ``nn.ModuleList``,
and ``holdfast.offload`` needs nothing else. Positions enter as a table that is computed once and passed to every block.
So a block owns nothing but parameters and can be built, run and thrown away by itself.

Shapes are suffixes: B batch, T tokens, D width of the stream, H query heads, G key/value heads, K head size, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..chunked_loss import chunked_cross_entropy, exceeds_chunk
from ..errors import BadInput
from ..quantities import round_up

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a ``Decoder``. ``hidden`` is the MLP's width, 8/3 of the stream's when not given.

    >>> DecoderConfig(width=256, heads=8, kv_heads=4).hidden_width
    704
    """

    vocabulary: int = 256
    blocks: int = 8
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    context: int = 256
    dropout: float = 0.0
    hidden: int | None = None
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "blocks", "width", "heads", "kv_heads", "context"):
            if getattr(self, name) < 1:
                raise BadInput(f"a decoder with {name} = {getattr(self, name)}: it must be at least 1")
        if self.width % (2 * self.heads):
            raise BadInput(f"a width of {self.width} does not divide into {self.heads} heads of even size")
        if self.heads % self.kv_heads:
            raise BadInput(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        return self.hidden or round_up(self.width * 8 // 3, 64)


class Decoder(nn.Module):
    """A decoder-only transformer over tokens ``[B, T]``, T at most ``config.context``.

    >>> model = Decoder(DecoderConfig(blocks=2, width=32, heads=2, kv_heads=1, context=16))
    >>> model(torch.zeros(3, 16, dtype=torch.int64)).shape
    torch.Size([3, 16, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = Projection(config.width, config.vocabulary)
        cos, sin = rotary_table(config.context, config.head_size, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy (nats) of ``targets`` int64[B, T] if given, else logits fp32[B, T, V].

        Logits of which there would be more than one chunk are not held whole for a loss (``chunked_cross_entropy``).
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise BadInput(f"{length} tokens in a sequence; the model's context is {self.config.context}")
        cos, sin = self.cos[:length], self.sin[:length]
        x_BTD = self.embed(tokens)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        x_BTD = self.norm(x_BTD)
        if targets is not None and exceeds_chunk(self.head, x_BTD):
            return chunked_cross_entropy(x_BTD, self.head.weight, targets.view(x_BTD.shape[:-1]))
        logits_BTV = self.head(x_BTD).float()
        if targets is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """One layer: adds the results of attention and then of the MLP to the stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos, sin))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Attention(nn.Module):
    """Causal attention in which H query heads share G heads of keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_width = config.kv_heads * config.head_size
        self.query = Projection(config.width, config.width)
        self.key = Projection(config.width, kv_width)
        self.value = Projection(config.width, kv_width)
        self.out = Projection(config.width, config.width, std=residual_std(config))

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_BHTK = rotate(self._split_heads(self.query(x_BTD)), cos, sin)
        k_BGTK = rotate(self._split_heads(self.key(x_BTD)), cos, sin)
        v_BGTK = self._split_heads(self.value(x_BTD))
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))

    def _split_heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: one projection decides how much of another passes."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Projection(config.width, config.hidden_width)
        self.up = Projection(config.width, config.hidden_width)
        self.down = Projection(config.hidden_width, config.width, std=residual_std(config))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Projection(nn.Linear):
    """A matrix without bias that stores the spread of its initial values."""

    def __init__(self, inputs: int, outputs: int, std: float = INIT_STD) -> None:
        self.std = std  # before the constructor of Linear, which initialises
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """One vector for each token."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


def residual_std(config: DecoderConfig) -> float:
    """Return the spread of a matrix whose result is added to the stream.

    2 * blocks such terms together have the spread of one.
    """
    return INIT_STD / (2 * config.blocks) ** 0.5


def rotary_table(context: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines fp32[context, head_size / 2] of position times frequency.

    They are on the CPU with real values even while parameters are created on the meta device.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    positions = torch.arange(context, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + K/2]) by its position's angle, in the precision of the table."""
    first, second = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BHTK.dtype)
