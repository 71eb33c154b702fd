"""Copies between pinned host memory and a device, each way alone and both at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..units import MiB
from .clock import median_seconds

COPY_BYTES = 256 * MiB


@dataclass(frozen=True)
class Copies:
    """Bytes per second, between pinned memory and the device."""

    upload: float
    download: float
    both: float
    """At once, in all."""


def measure_copies(device: torch.device, seconds: float) -> Copies | None:
    """Copies of pinned memory; None where the device computes in host memory."""
    if device.type != "cuda":
        return None
    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(up: bool, down: bool) -> None:
        if up:
            with torch.cuda.stream(streams[0]):
                there[0].copy_(host[0], non_blocking=True)
        if down:
            with torch.cuda.stream(streams[1]):
                host[1].copy_(there[1], non_blocking=True)
        _wait(device)

    up = COPY_BYTES / median_seconds(lambda: copy(True, False), seconds / 3)
    down = COPY_BYTES / median_seconds(lambda: copy(False, True), seconds / 3)
    both = 2 * COPY_BYTES / median_seconds(lambda: copy(True, True), seconds / 3)
    return Copies(up, down, both)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
