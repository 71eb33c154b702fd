"""The rates of host and device without the SSD: optimizer updates, checksums, matrix products, and copies.

Rates must be those that a run attains, so updates use a run's tiles and threads, and copies use pinned memory that
returns to the system afterwards. Each action is repeated as often as a time allows, at least once after a first run
that does not count, and the median counts; of matrix products the shortest. Called by the machine probe, by the
choice and checks of a dtype, and by the sizing of a job.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash
from torch import nn

from .. import accelerators
from ..io.buffers import Buffer
from ..optim.host_optimizer import HostOptimizer, ParameterState, SplitMaster
from ..optim.torch_threads import keep_torch_threads, one_torch_thread
from ..quantities import MiB
from ..state.split_masters import carry_bytes
from ..state.tensor_entries import STEP

WORKERS = 2
"""The number of optimizer threads of a run."""
CHECKED_BYTES = 64 * MiB
ELEMENTS = 4 * 2**20
"""The elements of each worker: more than fits in caches."""


def measure_update(seconds: float, elements: int = ELEMENTS, threads: int = 1) -> float:
    """Measure the elements per second of AdamW in fp32 with a copy in bf16, by all workers of ``threads`` together."""
    torch_optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
    optimizer = HostOptimizer(torch_optimizer)
    hyper, states = optimizer.snapshot(), [_state(elements, optimizer) for _ in range(WORKERS)]
    keep_torch_threads()
    optimizer.start_helpers(WORKERS, threads)
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


FASTER = 0.8
"""The share of bf16's time below which fp32 is chosen: its compute copies take twice the bytes."""


def fast_dtype(device: torch.device) -> Literal["bf16", "fp32"]:
    """Return the compute dtype that is fast on ``device``: bf16, but fp32 on a CPU that multiplies faster in fp32.

    The speed is measured, because processor flags do not tell it: some CPUs with bf16 instructions are half as fast in
    bf16. Another measurement may say otherwise, so a run keeps the dtype that it began with.
    """
    if device.type != "cpu":
        return "bf16"
    return "fp32" if product_seconds("float32") < FASTER * product_seconds("bfloat16") else "bf16"


COPY_BYTES = 256 * MiB


def measure_copies(device: torch.device, seconds: float, nbytes: int = COPY_BYTES) -> Copies | None:
    """Measure copies of ``nbytes`` for about ``seconds``; None where the device computes in host memory."""
    if not accelerators.is_accelerator(device):
        return None
    with _pinned(device, nbytes) as up, _pinned(device, nbytes) as down:
        return _measure(device, up, down, seconds)


@dataclass(frozen=True)
class Copies:
    """The rates of copies between pinned memory and the device, in bytes per second."""

    upload: float
    download: float
    both: float
    """The rate of copies in both directions at once, in all."""


def median_seconds(action: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of one ``action`` over the runs that fit into ``seconds``.

    A first run, which does not count, goes before.
    """
    action()
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while not found or time.perf_counter() < ends:
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _state(elements: int, optimizer: HostOptimizer) -> ParameterState:
    """Return a parameter whose bf16 copy is a part of its master, as in a run."""
    slots = optimizer.slots(0, (elements,))
    sizes = 2 * elements, 2 * elements, carry_bytes(elements)
    return ParameterState(
        param=SplitMaster.of((elements,), *(torch.zeros(size, dtype=torch.uint8) for size in sizes)),
        grad=torch.full((elements,), 1e-3),
        tensors={name: torch.zeros(elements) for name in slots.tensors},
        scalars={name: torch.zeros(()) for name in {*slots.scalars, STEP}},
        copy=None,
        group=0,
    )


def _measure(device: torch.device, source: torch.Tensor, target: torch.Tensor, seconds: float) -> Copies:
    there = [torch.empty_like(source, device=device) for _ in range(2)]
    streams = [accelerators.new_stream(device) for _ in range(2)]

    def copy(up: bool, down: bool) -> None:
        with accelerators.on_stream(streams[0]) if up else nullcontext():
            if up:
                there[0].copy_(source, non_blocking=True)
        with accelerators.on_stream(streams[1]) if down else nullcontext():
            if down:
                target.copy_(there[1], non_blocking=True)
        accelerators.synchronize(device)

    up = source.nbytes / median_seconds(lambda: copy(True, False), seconds / 3)
    down = source.nbytes / median_seconds(lambda: copy(False, True), seconds / 3)
    both = 2 * source.nbytes / median_seconds(lambda: copy(True, True), seconds / 3)
    return Copies(up, down, both)


@contextmanager
def _pinned(device: torch.device, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield host memory, pinned where possible, that returns to the system afterwards.

    torch would keep the memory that it pins itself until the process ends, and the engine's host budget would count
    it.
    """
    buffer = Buffer(nbytes, "probe")
    unpin = None
    try:
        with suppress(accelerators.CannotPin):  # the engine's copies would use unpinned memory, too
            unpin = accelerators.pin(buffer.view, device)
        yield torch.frombuffer(buffer.view, dtype=torch.uint8)
    finally:
        if unpin is not None:
            unpin()
        buffer.free()
