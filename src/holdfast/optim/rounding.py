"""Stochastic rounding of optimizer state to few bits, so that the errors of many small steps cancel out.

A moment with decay beta2 = 0.999 moves by a thousandth of its distance in each step. The nearest value of bf16 (steps
of 1/128 to 1/256) or of a byte is then mostly the old one, and a second moment that should fall stays where it is. Both
are therefore rounded up or down at random, with the mean at the exact value (Gupta et al. 2015, arXiv 1502.02551).

The random number is a hash of the value's own bits and the number of the step. No generator state must be stored, and
an element is rounded alike in any slice.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 256
"""The elements that share a scale. It divides 4096, at whose multiples updates are sliced."""


def chances(value: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """Return a number of 0 to 65535 for each element of an fp32 ``value``, varying with ``step`` and ``salt``."""
    mixed = value.view(torch.int32) + _signed(step * 0x9E3779B1 + salt * 0x85EBCA77)
    mixed = mixed * _signed(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 15)) * _signed(0x27D4EB2F)
    return (mixed >> 16) & 0xFFFF


def to_bf16(value: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """Return ``value`` in bf16, rounded stochastically."""
    bits = value.view(torch.int32) + chances(value, step, salt)
    return (bits & _signed(0xFFFF0000)).view(torch.float32).bfloat16()


@cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the 256 values of a byte in ascending order; the largest is 1.

    Each decade from 1e-7 to 1 has twice as many values as the one below it, in the middles of equal parts (dynamic
    quantization: Dettmers et al. 2021, arXiv 2110.02861). Without a sign, 1e-7 is the least, so that no value becomes
    zero.
    """
    values = [0.0, 1.0] if signed else [1e-7, 1.0]
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def encode(value: torch.Tensor, signed: bool, step: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of an fp32 ``value``, flat, and the scale of each block of ``BLOCK``: its largest magnitude."""
    count, levels = value.numel(), dynamic_map(signed).to(value.device)
    blocks = torch.nn.functional.pad(value.reshape(-1), (0, -count % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    parts = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)
    below = (torch.bucketize(parts, levels, right=True) - 1).clamp_(0, 254)
    low, high = levels[below], levels[below + 1]
    up = (parts - low) / (high - low) * 65536 > chances(blocks.view(-1), step, salt)
    return (below + up).to(torch.uint8)[:count], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the values that ``encode`` stored, flat, to the precision of a byte."""
    values = dynamic_map(signed).to(codes.device)[codes.reshape(-1).int()]
    padded = torch.nn.functional.pad(values, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    return (padded * scales[:, None]).view(-1)[: codes.numel()]


def _signed(bits: int) -> int:
    """Return the 32 lowest ``bits`` as a signed number."""
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)
