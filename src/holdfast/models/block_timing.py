"""The measurement of the forward and backward pass of a decoder's block on a device, for ``holdfast probe``.

A block of a usual size is timed first. The block of a named model is timed only if it will end in the given time and
fits on the device; otherwise a warning says that a smaller one was timed. Called by ``probing``.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from ..accelerators import is_accelerator, synchronize
from ..measure.hardware_rates import median_seconds
from ..measure.machine_probe import BlockTimes
from ..profiles import ModelProfile
from .decoder import Block, DecoderConfig, rotary_table

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
"""The block that is timed unless a model is named."""
ON_DEVICE = replace(ON_CPU, width=4096, heads=32, hidden=11008, sequence=2048, micro_batch=2)
TIMES = 2
"""Least number of times that a pass is timed, including the first, which does not count."""


def measure_block(
    device: torch.device, model: ModelProfile | None, seconds: float, dtype: torch.dtype
) -> BlockTimes:
    """Time a decoder's block in ``dtype``, with ``model``'s sizes if it is fast enough and fits on the device.

    The block has a gated MLP and no biases, whatever the model has.
    """
    usual = ON_DEVICE if is_accelerator(device) else ON_CPU
    if model is None:
        return _time_block(device, usual, seconds, dtype)
    small = _time_block(device, usual, seconds / 2, dtype)
    expected = TIMES * 4 * model.forward_flop / small.flop_per_second
    why = f"would take about {expected:.0f} s" if expected > seconds else ""
    try:
        if not why:
            return _time_block(device, model, seconds / 2, dtype)
    except torch.OutOfMemoryError:
        why = "does not fit on the device"
    warnings.warn(f"a block of {model.description} {why}; a smaller one was timed", stacklevel=2)
    return small


def _time_block(device: torch.device, model: ModelProfile, seconds: float, dtype: torch.dtype) -> BlockTimes:
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
        block = Block(config).to(dtype)
        x = torch.randn(timed.micro_batch, timed.sequence, timed.width, dtype=dtype)
    cos, sin = (table.to(device) for table in rotary_table(timed.sequence, config.head_size, 10000.0))

    def forward() -> None:
        with torch.no_grad():
            block(x, cos, sin)
        synchronize(device)

    def backward() -> None:
        block(x, cos, sin).sum().backward()
        block.zero_grad()
        synchronize(device)

    one, other = median_seconds(forward, seconds / 2), median_seconds(backward, seconds / 2)
    rate = 4 * timed.forward_flop / (one + other)
    what = f"a block of width {timed.width}, {timed.tokens} tokens, in {str(dtype).removeprefix('torch.')}"
    return BlockTimes(one, other, rate, what)
