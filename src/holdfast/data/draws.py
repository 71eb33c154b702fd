"""Draws: random numbers of a dataset that depend only on the sample.

A dataset's code uses the generators of the process: ``random``, NumPy's global one, and torch's on the CPU. While
samples are read, these are seeded anew for each, and afterwards restored. So reading in the trainer's process and in
a worker's gives the same samples and leaves the trainer's streams alone.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import xxhash


@contextmanager
def streams_put_back() -> Iterator[None]:
    """Restore the process's generators after the block, whatever is seeded or drawn within it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_streams(*key: int) -> None:
    """Seed the process's generators with ``key``: integers from 0 to ``2**64 - 1``.

    >>> with streams_put_back():
    ...     seed_streams(3, 1)
    ...     first = random.random()
    ...     seed_streams(3, 1)
    ...     first == random.random()
    True
    """
    seed = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(key)}Q", *key))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
