"""Samples of a compute copy, by which changes are found that leave no trace in torch: those through ``.data``.

A parameter of a pass shares the memory of its unit's compute copy. A change in place is counted by the parameter's
version, but one through ``.data`` is not, and it would be lost, or last until the next update. So the bytes of a few
elements of every parameter are read when a pass begins and compared when it ends. A change that spares all of these
elements is not found. Called by the computations, and by ``parameter_ops``.
"""

from __future__ import annotations

import torch

from .block_states import BlockState

SAMPLED = 64
"""Elements of each parameter that are compared, spread evenly; all of a smaller parameter."""


class ParameterSamples:
    """The sampled places of one unit."""

    def __init__(self, unit: BlockState, device: torch.device) -> None:
        """Choose the places. Samples are read on ``device``."""
        found = [
            _places(member.copy_offset, member.elements, member.copy_dtype.itemsize)
            for member in unit.members
        ]
        self._names = [member.name for member in unit.members]
        self._counts = [len(each) for each in found]
        self._places = torch.cat(found).to(device)

    def read(self, copy: torch.Tensor) -> torch.Tensor:
        """Return the sampled bytes (uint8 [count]) of the whole compute copy ``copy``, on its device."""
        return copy[self._places]

    def changed(self, before: torch.Tensor, after: torch.Tensor) -> list[str]:
        """Return the names of the parameters whose samples differ."""
        if torch.equal(before, after):
            return []
        parts = (before != after).split(self._counts)
        return [name for name, part in zip(self._names, parts, strict=True) if bool(part.any())]


def _places(offset: int, elements: int, itemsize: int) -> torch.Tensor:
    """Return the offsets (int64 [count]) of the bytes of the sampled elements of one parameter."""
    chosen = (
        torch.linspace(0, max(elements - 1, 0), min(elements, SAMPLED), dtype=torch.float64).round().long()
    )
    return (offset + chosen[:, None] * itemsize + torch.arange(itemsize)).flatten()
