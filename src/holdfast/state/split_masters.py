"""fp32 masters in three parts, so that the bf16 compute copy is one of them and is not stored a second time.

``high`` is the master rounded to nearest even, as torch rounds: the compute copy. ``low`` is the lower half of the
master's bits. ``carry``, one bit for each element, says whether rounding went up: the upper half is ``high`` less the
carry. torch rounds every NaN to one value, which would lose bits. So ``high`` of a NaN is the upper half with the quiet
bit set, which is a NaN too, and ``carry`` says whether the bit was set before. All 2**32 bit patterns come back.

A master of 24 bits has zeros for its 8 lowest ones, and ``low`` is one byte. Values that need more are rounded to the
nearest that does not.

A tensor has its carries packed as ``numpy.packbits`` does: eight to a byte, the first in the highest bit. Called by
updates, slice by slice, and by readers of files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PARTS = ("high", "low", "carry")
"""The names of the parts of a master."""
DTYPES = {32: ("BF16", "U16", "U8"), 24: ("BF16", "U8", "U8")}
"""The dtypes of the parts, as a file names them, by the bits of a master."""
GROUP = 8
"""The elements whose carries share a byte: a part of a tensor that is read by itself starts at a multiple."""
_QUIET, _INFINITY, _MAGNITUDE = (np.uint16(bits) for bits in (0x0040, 0x7F80, 0x7FFF))


class SplitArrays(NamedTuple):
    """The parts of consecutive elements: flat arrays of uint16, of uint16 (or uint8, for 24 bits), of packed uint8."""

    high: np.ndarray
    low: np.ndarray
    carry: np.ndarray


def part_key(key: str, part: str) -> str:
    """Return the key, in a file, of a part of the tensor ``key``.

    >>> part_key("head.weight/param", "low")
    'head.weight/param.low'
    """
    return f"{key}.{part}"


def key_of_whole(key: str) -> str:
    """Return the key of the tensor that ``key``, in a file, belongs to: that of the master for a part of one.

    >>> key_of_whole("head.weight/param.low"), key_of_whole("head.weight/exp_avg")
    ('head.weight/param', 'head.weight/exp_avg')
    """
    whole, _, part = key.rpartition(".")
    return whole if part in PARTS and whole.endswith("/param") else key


def carry_bytes(elements: int) -> int:
    """Return the bytes of the packed carries of ``elements`` elements."""
    return -(-elements // GROUP)


def split(master: np.ndarray, parts: SplitArrays) -> None:
    """Write the parts of ``master``, a flat array of fp32 bits as uint32."""
    import torch

    high, low, carry = parts
    if low.itemsize == 1:
        master = nearest_24_bits(master)
    values = torch.from_numpy(master.view(np.float32))
    torch.from_numpy(high.view(np.int16)).view(torch.bfloat16).copy_(values)
    np.copyto(low, master if low.itemsize == 2 else master >> 8, casting="unsafe")
    upper = np.right_shift(master, 16).astype(np.uint16)
    carried = np.not_equal(high, upper)
    if bool(values.sum().isnan()):  # any NaN makes the sum one; a NaN from infinities alone does no harm
        nan = (upper & _MAGNITUDE > _INFINITY) | ((upper & _MAGNITUDE == _INFINITY) & (low != 0))
        high[nan] = upper[nan] | _QUIET
        carried[nan] = (upper[nan] & _QUIET) != 0
    carry[:] = np.packbits(carried)


def join(parts: SplitArrays, master: np.ndarray) -> None:
    """Write the masters, as uint32, of which ``parts`` are the parts. Inverse of ``split``."""
    high, low, carry = parts
    carried = np.unpackbits(carry, count=len(high))
    upper = np.subtract(high, carried, dtype=np.uint16)
    magnitude = high & _MAGNITUDE
    if len(high) and magnitude.max() > _INFINITY:
        nan = magnitude > _INFINITY
        upper[nan] = np.where(carried[nan], high[nan], high[nan] & ~_QUIET)
    np.copyto(master, upper)
    np.left_shift(master, 16, out=master)
    np.bitwise_or(master, low if low.itemsize == 2 else np.left_shift(low, 8, dtype=np.uint32), out=master)


def nearest_24_bits(master: np.ndarray) -> np.ndarray:
    """Return fp32 bits, as uint32, rounded to nearest even so that the 8 lowest are zeros. A NaN stays one."""
    rounded = master + (((master >> 8) & 1) + 0x7F)
    nan = (master & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        kept = master[nan] & np.uint32(0xFFFFFF00)
        rounded[nan] = np.where(kept & 0x007FFFFF, kept, kept | 0x00400000)
    return rounded & np.uint32(0xFFFFFF00)
