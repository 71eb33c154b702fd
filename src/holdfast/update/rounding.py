"""Rounding of optimizer state to few bits, so that the errors of many small steps add up to nothing.

A moment with decay beta2 = 0.999 moves by a thousandth of its distance in each step. The nearest value that bf16 (steps
of 1/128 to 1/256) or a byte has is then mostly the one that it had, and a second moment that should fall stays where it
is. So both are rounded up or down by chance, with the mean at the value (stochastic rounding: Gupta et al. 2015, arXiv
1502.02551).

The chance is a hash of the value's own bits and the number of the step: no generator whose state a commit would have
to hold, and an element is rounded alike in whatever slice it is.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 256
"""Elements that share a scale. It divides 4096, at whose multiples updates are cut."""


def chances(value: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """For each element of an fp32 ``value`` one of 0 to 65535, another at each ``step`` and for each ``salt``."""
    mixed = value.view(torch.int32) + _signed(step * 0x9E3779B1 + salt * 0x85EBCA77)
    mixed = mixed * _signed(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 15)) * _signed(0x27D4EB2F)
    return (mixed >> 16) & 0xFFFF


def to_bf16(value: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """``value`` in bf16, rounded by chance."""
    bits = value.view(torch.int32) + chances(value, step, salt)
    return (bits & _signed(0xFFFF0000)).view(torch.float32).bfloat16()


@cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 values of a byte, ascending, the largest 1: of each decade from 1e-7 to 1 twice as many as of the one
    below it, in its middle parts (dynamic quantization: Dettmers et al. 2021, arXiv 2110.02861). Without a sign 1e-7
    is the least one, so that what is not zero does not become it."""
    values = [0.0, 1.0] if signed else [1e-7, 1.0]
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def encode(value: torch.Tensor, signed: bool, step: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of an fp32 ``value``, flat, and the scale of each block of ``BLOCK``: its largest magnitude."""
    count, levels = value.numel(), dynamic_map(signed).to(value.device)
    blocks = torch.nn.functional.pad(value.reshape(-1), (0, -count % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    parts = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)
    below = (torch.bucketize(parts, levels, right=True) - 1).clamp_(0, 254)
    low, high = levels[below], levels[below + 1]
    up = (parts - low) / (high - low) * 65536 > chances(blocks.view(-1), step, salt)
    return (below + up).to(torch.uint8)[:count], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """What ``encode`` was given, as far as bytes hold it; flat."""
    values = dynamic_map(signed).to(codes.device)[codes.reshape(-1).int()]
    padded = torch.nn.functional.pad(values, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    return (padded * scales[:, None]).view(-1)[: codes.numel()]


def _signed(bits: int) -> int:
    """The 32 lowest ``bits`` as a signed number."""
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)
