"""How ZeRO cuts: where the elements of parameters lie in its flat tensors, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence


def starts_of(numels: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Where parameters of so many elements begin that are joined, each but the last padded to ``alignment`` elements;
    and where the last one ends.

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
    """Elements in each rank's share of ``total`` joined ones: all are padded to twice as many as there are ranks.

    >>> share_of(877, 4)
    220
    """
    return -(-total // (2 * ranks)) * 2


def dealt(count: int, ranks: int) -> list[int]:
    """The order in which ``round_robin_gradients`` joins parameters.

    >>> dealt(5, 2)
    [0, 2, 4, 1, 3]
    """
    return sorted(range(count), key=lambda number: (number % ranks, number))


def cut(n: int, rank: int, ranks: int) -> tuple[int, int]:
    """The elements of a parameter of ``n`` that a rank has in stage 3.

    >>> [cut(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-n // ranks)
    return min(rank * each, n), min((rank + 1) * each, n)
