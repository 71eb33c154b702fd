"""The rates of the host: optimizer updates with a run's tiles and threads, checksums, matrix products."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch
import xxhash
from torch import nn

from ..optim.host_optimizer import SHARED_TILE_ELEMENTS, HostOptimizer, ParameterState
from ..optim.torch_threads import keep_torch_threads, one_torch_thread
from ..quantities import MiB
from ..state.tensor_entries import STEP
from .clock import median_seconds

WORKERS = 2
"""The number of optimizer threads of a run."""

CHECKED_BYTES = 64 * MiB

ELEMENTS = 4 * 2**20
"""The elements of each worker: more than fits in caches."""


def measure_update(seconds: float, elements: int = ELEMENTS, helpers: int = 0) -> float:
    """Measure the elements per second of AdamW in fp32 with a copy in bf16, all workers and helpers together."""
    torch_optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
    optimizer = HostOptimizer(torch_optimizer)
    elements = max(elements, helpers * SHARED_TILE_ELEMENTS)  # so that each of them has a tile
    hyper, states = optimizer.snapshot(), [_state(elements, optimizer) for _ in range(WORKERS)]
    keep_torch_threads()
    optimizer.start_helpers(helpers)
    with closing(optimizer), ThreadPoolExecutor(WORKERS, initializer=one_torch_thread) as pool:
        each = median_seconds(
            lambda: list(pool.map(lambda state: optimizer.update(state, hyper), states)), seconds
        )
    torch.set_num_threads(torch.get_num_threads())  # the setting that threads started later inherit
    return WORKERS * elements / each


def measure_checks(seconds: float) -> float:
    """Measure the bytes per second that one core checksums, as it does with every byte the SSD moves."""
    memory = bytearray(CHECKED_BYTES)
    return CHECKED_BYTES / median_seconds(lambda: xxhash.xxh3_64_digest(memory), seconds)


def _state(elements: int, optimizer: HostOptimizer) -> ParameterState:
    slots = optimizer.slots(0, (elements,))
    return ParameterState(
        param=torch.zeros(elements),
        grad=torch.full((elements,), 1e-3),
        tensors={name: torch.zeros(elements) for name in slots.tensors},
        scalars={name: torch.zeros(()) for name in {*slots.scalars, STEP}},
        copy=torch.zeros(elements, dtype=torch.bfloat16),
        group=0,
    )


SIDE = 384
"""The rows and columns of the matrices whose product is timed.

A product takes 0.1 ms, or 50 ms where a processor is slow in bf16.
"""

ROUNDS, SECONDS = (4, 100), 0.02
"""The least and the most number of products, and the seconds to spend between these bounds.

Some products are slow because of other work on the machine.
"""


def product_seconds(dtype: str) -> float:
    """Return the shortest time of one matrix product on the host, in the torch dtype of this name."""
    one = torch.ones(SIDE, SIDE, dtype=getattr(torch, dtype), device="cpu")
    taken: list[float] = []
    while len(taken) < ROUNDS[0] or (len(taken) < ROUNDS[1] and sum(taken) < SECONDS):
        start = time.perf_counter()
        torch.mm(one, one)  # the first one prepares the kernel
        taken.append(time.perf_counter() - start)
    return min(taken)
