"""A master in host memory whose bits are in three parts (``state/split_masters``), as tensors see it.

The parts are views into a state image, in which the high parts of all parameters are the compute copy. An update joins
a slice, steps it as fp32, and splits it again. Called by the host optimizer and by conversions of state images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..state.split_masters import GROUP, SplitArrays, carry_bytes, join, nearest_24_bits, split

SLICE = 256 * 1024
"""The elements that are joined or split at once, so that what is computed on the way stays in cache."""


@dataclass(frozen=True, eq=False)
class SplitMaster:
    """One fp32 tensor of ``shape``, contiguous, or a flat slice of one."""

    parts: SplitArrays
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls, shape: tuple[int, ...], high: torch.Tensor, low: torch.Tensor, carry: torch.Tensor
    ) -> SplitMaster:
        """Return the master whose parts are the bytes of three uint8 tensors in host memory."""
        lower = np.uint16 if len(low) == len(high) else np.uint8
        arrays = (high.numpy().view(np.uint16), low.numpy().view(lower), carry.numpy())
        return cls(SplitArrays(*arrays), shape)

    @property
    def elements(self) -> int:
        return len(self.parts.high)

    @property
    def high(self) -> torch.Tensor:
        """The compute copy, in bf16: a view of the memory."""
        return torch.from_numpy(self.parts.high.view(np.int16)).view(torch.bfloat16).view(self.shape)

    def slice(self, start: int, stop: int) -> SplitMaster:
        """Return elements ``start`` to ``stop`` as a flat master. ``start`` must be a multiple of 8."""
        assert start % GROUP == 0
        high, low, carry = self.parts
        packed = carry[start // GROUP : start // GROUP + carry_bytes(stop - start)]
        return SplitMaster(SplitArrays(high[start:stop], low[start:stop], packed), (stop - start,))

    def joined(self) -> torch.Tensor:
        """Return the values in fp32, in memory of their own."""
        values = torch.empty(self.elements, dtype=torch.float32, device="cpu")
        bits = values.numpy().view(np.uint32)
        for start in range(0, self.elements, SLICE):
            stop = min(start + SLICE, self.elements)
            join(self.slice(start, stop).parts, bits[start:stop])
        return values.view(self.shape)

    def set(self, values: torch.Tensor) -> None:
        """Set the values to those of an fp32 tensor in host memory."""
        bits = values.detach().contiguous().view(-1).numpy().view(np.uint32)
        for start in range(0, self.elements, SLICE):
            stop = min(start + SLICE, self.elements)
            split(bits[start:stop], self.slice(start, stop).parts)


def round_to_24_bits(values: torch.Tensor) -> None:
    """Round a contiguous fp32 tensor in host memory, in place, to the nearest values of 24 bits."""
    bits = values.view(-1).numpy().view(np.uint32)
    for start in range(0, len(bits), SLICE):
        bits[start : start + SLICE] = nearest_24_bits(bits[start : start + SLICE])
