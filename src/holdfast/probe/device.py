"""The device: a block's forward and backward pass in bf16, and copies from and to the host."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from ..models.decoder import Block, DecoderConfig, rotary_table
from ..profiles import ModelProfile
from ..units import MiB
from .clock import median_seconds

ON_CPU = ModelProfile(
    description="a block of the reference decoder",
    blocks=1,
    width=512,
    heads=8,
    hidden=1408,
    gated=True,
    vocabulary=256,
    sequence=256,
)
"""What is timed unless a model is named."""

ON_DEVICE = replace(ON_CPU, width=4096, heads=32, hidden=11008, sequence=2048, micro_batch=2)

COPY_BYTES = 256 * MiB

TIMES = 2
"""That a pass is timed at least, the one that does not count among them."""


@dataclass(frozen=True)
class BlockTimes:
    """Of one micro-batch through one block."""

    forward_seconds: float
    backward_seconds: float
    """With the recomputation."""
    flop_per_second: float
    timed: ModelProfile


@dataclass(frozen=True)
class Copies:
    """Bytes per second, between pinned memory and the device."""

    upload: float
    download: float
    both: float
    """At once, in all."""


def measure_block(device: torch.device, model: ModelProfile | None, seconds: float) -> BlockTimes:
    """Time a decoder's block, of ``model``'s sizes if one of those is done in time and fits on the device. It has a
    gated MLP and no biases, whatever the model has."""
    usual = ON_DEVICE if device.type == "cuda" else ON_CPU
    if model is None:
        return _time_block(device, usual, seconds)
    small = _time_block(device, usual, seconds / 2)
    expected = TIMES * 4 * model.forward_flop / small.flop_per_second
    why = f"would take about {expected:.0f} s" if expected > seconds else ""
    try:
        if not why:
            return _time_block(device, model, seconds / 2)
    except torch.OutOfMemoryError:
        why = "does not fit on the device"
    warnings.warn(f"a block of {model.description} {why}; a smaller one was timed", stacklevel=2)
    return small


def _time_block(device: torch.device, model: ModelProfile, seconds: float) -> BlockTimes:
    timed = replace(model, gated=True, biases=False, head_size=0)
    config = DecoderConfig(
        blocks=1,
        width=timed.width,
        heads=timed.heads,
        kv_heads=timed.kv_heads or timed.heads,
        context=timed.sequence,
        hidden=timed.hidden or 4 * timed.width,
    )
    with torch.device(device):
        block = Block(config).to(torch.bfloat16)
        x = torch.randn(timed.micro_batch, timed.sequence, timed.width, dtype=torch.bfloat16)
    cos, sin = (table.to(device) for table in rotary_table(timed.sequence, config.head_size, 10000.0))

    def forward() -> None:
        with torch.no_grad():
            block(x, cos, sin)
        _wait(device)

    def backward() -> None:
        block(x, cos, sin).sum().backward()
        block.zero_grad()
        _wait(device)

    one, other = median_seconds(forward, seconds / 2), median_seconds(backward, seconds / 2)
    return BlockTimes(one, other, 4 * timed.forward_flop / (one + other), timed)


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
