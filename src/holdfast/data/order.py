"""Order: the order of samples, as a pure function of (seed, number of the sample).

Samples are numbered globally from 0, over all ranks and epochs. Every epoch visits each sample once, in an order of
its own. Nothing is stored: the permutation is a small block cipher on the sample's index, so sample 10**12 costs what
sample 0 costs, and a position is one integer.
"""

from __future__ import annotations

import struct

import xxhash

ROUNDS = 6


def sample_index(number: int, *, size: int, seed: int) -> int:
    """Return the index, in a dataset of ``size`` samples, of global sample ``number``.

    >>> sorted(sample_index(number, size=5, seed=1) for number in range(5))
    [0, 1, 2, 3, 4]
    """
    epoch, position = divmod(number, size)
    return permute(position, size, seed, epoch)


def permute(position: int, size: int, *key: int) -> int:
    """Return the place of ``position`` in the permutation of ``range(size)`` named by ``key``.

    A Feistel network permutes the next larger 4**half values. A value outside the range goes through the network
    again until it is inside, which keeps the map one-to-one and takes four turns at most on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    value = position
    while True:
        value = _feistel(value, half, key)
        if value < size:
            return value


def _feistel(value: int, half: int, key: tuple[int, ...]) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        mixed = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(key) + 2}Q", *key, turn, right))
        left, right = right, left ^ (mixed & mask)
    return left << half | right
