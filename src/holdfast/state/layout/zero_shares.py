"""The arithmetic of ZeRO's division: where the elements of parameters are in its flat tensors.

Pure numbers, as DeepSpeed computes them; readers compare them with what a checkpoint or an engine records. Called by
the readers of ZeRO checkpoints and by ``zero``.
"""

from __future__ import annotations

from collections.abc import Sequence


def starts_of(numels: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Return where joined parameters of ``numels`` elements begin, and where the last one ends.

    Each but the last is padded to ``alignment`` elements.

    >>> starts_of([5, 3, 2], 4)
    ([0, 8, 12], 14)
    """
    starts, at = [], 0
    for number, elements in enumerate(numels):
        starts.append(at)
        at += elements
        if number < len(numels) - 1:
            at += -at % alignment
    return starts, at


def share_of(total: int, ranks: int) -> int:
    """Return the elements of each rank's part of ``total`` joined ones.

    All are padded to a multiple of twice the number of ranks.

    >>> share_of(877, 4)
    220
    """
    return -(-total // (2 * ranks)) * 2


def dealt(count: int, ranks: int) -> list[int]:
    """Return the order in which ``round_robin_gradients`` joins parameters.

    >>> dealt(5, 2)
    [0, 2, 4, 1, 3]
    """
    return sorted(range(count), key=lambda number: (number % ranks, number))


def cut(n: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements of a parameter of ``n`` that a rank has in stage 3.

    >>> [cut(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-n // ranks)
    return min(rank * each, n), min((rank + 1) * each, n)
