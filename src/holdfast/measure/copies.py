"""Copies between pinned host memory and a device, each way alone and both at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from .. import accelerators
from ..io.buffers import Buffer
from ..quantities import MiB
from .clock import median_seconds

COPY_BYTES = 256 * MiB


@dataclass(frozen=True)
class Copies:
    """The rates of copies between pinned memory and the device, in bytes per second."""

    upload: float
    download: float
    both: float
    """The rate of copies in both directions at once, in all."""


def measure_copies(device: torch.device, seconds: float, nbytes: int = COPY_BYTES) -> Copies | None:
    """Measure copies of ``nbytes`` for about ``seconds``; None where the device computes in host memory."""
    if not accelerators.is_accelerator(device):
        return None
    with _pinned(device, nbytes) as up, _pinned(device, nbytes) as down:
        return _measure(device, up, down, seconds)


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
