"""A source whose tensors are in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..state.layout.fragments import Fragments, dense
from ..state.layout.regions import Box
from ..state.plain_tensors import host_bytes
from ..state.tensor_entries import Atom
from .source import Part, Source, Stored


class InMemory(Source):
    """A source of whole tensors in memory; a read returns what the tensors hold at that time."""

    def __init__(
        self, path: str, format: str, atoms: list[tuple[Atom, torch.Tensor]], progress: dict[str, Any]
    ) -> None:
        super().__init__(path, format, progress=progress)
        self._arrays: list[np.ndarray] = []
        for atom, tensor in atoms:
            array = host_bytes(tensor)
            self._arrays.append(array)
            part = self.add_part(Part(path, 0, array.nbytes, atom.dtype))
            self.add(Stored(atom, Fragments.of([dense(Box.whole(atom.shape), part)], len(atom.shape))))

    def read(self, part: int, offset: int, into: memoryview) -> None:
        np.frombuffer(into, dtype=np.uint8)[:] = self._arrays[part][offset : offset + len(into)]

    def check(self, part: int) -> None:
        """Do nothing: there is no checksum to compare with."""
