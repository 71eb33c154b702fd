"""Distribution of the units of state over several SSDs. Bytes, bytes per second.

A unit's files all lie on one drive. Units go round in proportion to the rate of each drive, so that in every step and
every stretch of blocks all drives are busy for about the same time. Several ranks move their parts of one unit at once,
so these lie on different drives too.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares_of_state(rates: Sequence[float], state_bytes: int, other_bytes: int) -> tuple[float, ...]:
    """Return the fraction of the state that each drive has, given the drives' ``rates``.

    A step moves ``state_bytes`` of the state, and ``other_bytes`` that lie on the first drive anyway.

    >>> shares_of_state([1.0, 3.0], 100, 0)
    (0.25, 0.75)
    >>> shares_of_state([1.0, 1.0], 100, 50)
    (0.25, 0.75)
    """
    total, others = sum(rates), sum(rates[1:])
    if not state_bytes or not others:
        return tuple(rate / total for rate in rates)
    first = max(0.0, rates[0] / total * (state_bytes + other_bytes) - other_bytes) / state_bytes
    return first, *((1 - first) * rate / others for rate in rates[1:])


def spread(sizes: Sequence[Sequence[int]], shares: Sequence[float]) -> list[list[int]]:
    """Return the drive of each unit of each rank, in the order in which a step goes through the units.

    It is the drive that is furthest behind its share, counting all ranks and this one together.

    >>> spread([[8, 8, 8, 8, 8, 8]], [1 / 3, 2 / 3])
    [[1, 0, 1, 1, 0, 1]]
    >>> spread([[8, 8, 8, 8], [8, 8, 8, 8]], [1 / 2, 1 / 2])
    [[0, 1, 0, 1], [1, 0, 1, 0]]
    """
    found: list[list[int]] = [[] for _ in sizes]
    placed, together = [[0] * len(shares) for _ in sizes], [0] * len(shares)
    for unit in range(len(sizes[0])):
        for rank, own in enumerate(placed):
            nbytes = sizes[rank][unit]
            wanted = sum(own) + sum(together) + 2 * nbytes
            behind = [share * wanted - (a + b) for share, a, b in zip(shares, own, together, strict=True)]
            drive = behind.index(max(behind))
            own[drive] += nbytes
            together[drive] += nbytes
            found[rank].append(drive)
    return found
