"""The size of a chunk of tokens, for which the logits of a loss are computed at once.

Losses and gradients are sums over chunks, so the size is part of the numerics. It depends on the vocabulary alone,
never on memory or machine: a run that continues elsewhere has the same bits. Used by ``chunked_loss``, and by the
planner.
"""

from __future__ import annotations

LOGITS_PER_CHUNK = 2**25
"""The most logits that exist at once, unless one token has more. Another value gives other bits."""


def rows_per_chunk(vocabulary: int) -> int:
    """Return the number of tokens in a chunk.

    >>> rows_per_chunk(131072)
    256
    """
    return max(1, LOGITS_PER_CHUNK // vocabulary)
