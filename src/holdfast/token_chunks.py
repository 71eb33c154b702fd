"""The sizes of the pieces in which the loss of a head is computed: chunks of tokens, and tiles of the vocabulary.

Losses and gradients are sums over chunks, and products have the shapes of tiles, so the sizes are part of the numerics.
They depend on the vocabulary alone, never on memory or machine: a run that continues elsewhere has the same bits. The
number of tokens for which the softmax is computed at once changes no bit. Used by ``chunked_loss``, and by the planner.
"""

from __future__ import annotations

LOGITS_PER_CHUNK = 2**25
"""The most logits that exist at once, unless one token has more. Another value gives other bits."""
WORDS_PER_TILE = 2**13
"""The most words for which logits, and gradients of the head, are one product. Another value may give other bits."""
LOGITS_AT_ONCE = 2**23
"""The most logits of a chunk for which the softmax is computed at once, unless one token has more."""


def rows_per_chunk(vocabulary: int) -> int:
    """Return the number of tokens in a chunk.

    >>> rows_per_chunk(131072)
    256
    """
    return max(1, LOGITS_PER_CHUNK // vocabulary)


def rows_at_once(vocabulary: int) -> int:
    """Return the number of tokens of a chunk for which the softmax is computed at once."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


def tiles_of(vocabulary: int) -> list[slice]:
    """Return the words of each tile.

    >>> tiles_of(20_000)
    [slice(0, 8192, None), slice(8192, 16384, None), slice(16384, 20000, None)]
    """
    return pieces(vocabulary, WORDS_PER_TILE)


def pieces(count: int, size: int) -> list[slice]:
    """Return slices of ``size``, the last one maybe smaller, that are ``count`` together."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
