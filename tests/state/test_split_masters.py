"""fp32 masters in three parts: every bit comes back, and the high part is torch's own rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.state.split_masters import SplitArrays, carry_bytes, join, nearest_24_bits, split

EVERY = 1 << 16
"""The number of patterns of 16 bits."""
LOWS = (
    *range(4), 0x1F, 0x20, 0x3F, 0x40, 0x41, 0x7F, 0x80, 0xFF, 0x100, 0x3FFF, 0x4000, 0x7F7F, 0x7F80, 0x7FC0,
    *range(0x7FFC, 0x8005), 0x8040, 0x8080, 0x80FF, 0xBFFF, 0xC000, 0xFF7F, 0xFF80, 0xFFBF, 0xFFC0,
    *range(0xFFFB, 0x10000),
)  # fmt: skip
"""Lower halves around zero, around the tie and at both ends, which decide what is rounded up and what is infinite."""


def empty_parts(elements: int, low: type[np.unsignedinteger] = np.uint16) -> SplitArrays:
    return SplitArrays(
        np.full(elements, 0xA5A5, np.uint16),
        np.full(elements, 0x5A, low),
        np.full(carry_bytes(elements), 0xC3, np.uint8),
    )


def check(master: np.ndarray, low: type[np.unsignedinteger] = np.uint16) -> None:
    """Every bit of ``master`` comes back, and its high part is the value that torch rounds to."""
    parts, found = empty_parts(len(master), low), np.full_like(master, 0x01234567)
    split(master, parts)
    join(parts, found)
    assert np.array_equal(found, master)
    values = torch.from_numpy(master.view(np.float32))
    high = torch.from_numpy(parts.high.view(np.int16)).view(torch.bfloat16)
    rounded, nan = values.to(torch.bfloat16), values.isnan()
    assert torch.equal(high.isnan(), nan)
    assert torch.equal(high[~nan].view(torch.int16), rounded[~nan].view(torch.int16))


def with_low(low: int) -> np.ndarray:
    """Return every upper half with the lower half ``low``."""
    return (np.arange(EVERY, dtype=np.uint32) << 16) | np.uint32(low)


def test_every_upper_half_comes_back_with_chosen_lower_halves():
    assert len(LOWS) >= 40
    for low in LOWS:
        check(with_low(low))


@pytest.mark.campaign
def test_every_fp32_pattern_comes_back():
    for low in range(EVERY):
        check(with_low(low))


def test_every_pattern_of_24_bits_comes_back_from_one_byte_less():
    for low in range(0, EVERY, 0x100):
        check(with_low(low), np.uint8)


def test_masters_of_more_bits_are_rounded_to_the_nearest_of_24():
    for low in LOWS:
        master = with_low(low)
        parts, found = empty_parts(len(master), np.uint8), np.zeros_like(master)
        split(master, parts)
        join(parts, found)
        with np.errstate(invalid="ignore"):  # NaNs
            values, near = (bits.view(np.float32).astype(np.float64) for bits in (master, found))
            around = [(master & 0xFFFFFF00) + np.uint32(up) for up in (0, 0x100)]
            ways = [np.abs(bits.view(np.float32).astype(np.float64) - values) for bits in around]
        assert not (found & 0xFF).any() and np.array_equal(np.isnan(values), np.isnan(near))
        finite = np.isfinite(values) & np.isfinite(near)
        assert np.array_equal(np.abs(near[finite] - values[finite]), np.minimum(*ways)[finite])
        ties = finite & (master & 0xFF == 0x80)
        assert not (found[ties] & 0x100).any(), "a tie goes to the even one"
        assert np.array_equal(nearest_24_bits(found), found)


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 4096, 4099])
def test_any_number_of_elements_is_split(elements):
    bits = np.random.default_rng(elements).integers(0, 1 << 32, elements, dtype=np.uint32)
    check(bits)


def test_ordinary_masters_without_any_nan_come_back():
    """They take the short way, which looks for no NaN, and so do infinities of one sign."""
    values = np.random.default_rng(0).normal(0, 0.02, 100_000).astype(np.float32)
    check(values.view(np.uint32))
    values[::7] = np.inf
    check(values.view(np.uint32))
    values[::5] = -np.inf  # a sum of both is a NaN
    check(values.view(np.uint32))


def test_parts_of_a_tensor_are_joined_by_themselves():
    master = np.random.default_rng(1).integers(0, 1 << 32, 1000, dtype=np.uint32)
    parts, found = empty_parts(1000), np.zeros(160, np.uint32)
    split(master, parts)
    join(SplitArrays(parts.high[40:200], parts.low[40:200], parts.carry[5:25]), found)
    assert np.array_equal(found, master[40:200])
