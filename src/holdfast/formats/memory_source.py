"""A source whose tensors are in memory, such as a step that was replayed from its log.

A read returns what the tensors hold at that time, so nothing may change them while the source is in use. Made by
``opening``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..state.layout.fragments import Fragments, dense
from ..state.layout.regions import Region
from ..state.plain_tensors import host_bytes
from ..state.tensor_entries import TensorEntry
from .source import Source, SourceTensor, StoredArray


class InMemory(Source):
    """A source of whole tensors in memory; a read returns what the tensors hold at that time."""

    def __init__(
        self, path: str, format: str, atoms: list[tuple[TensorEntry, torch.Tensor]], progress: dict[str, Any]
    ) -> None:
        super().__init__(path, format, progress=progress)
        self._arrays: list[np.ndarray] = []
        for atom, tensor in atoms:
            array = host_bytes(tensor)
            self._arrays.append(array)
            part = self.add_part(StoredArray(path, 0, array.nbytes, atom.dtype))
            self.add(
                SourceTensor(atom, Fragments.of([dense(Region.whole(atom.shape), part)], len(atom.shape)))
            )

    def read(self, part: int, offset: int, into: memoryview) -> None:
        np.frombuffer(into, dtype=np.uint8)[:] = self._arrays[part][offset : offset + len(into)]

    def check(self, part: int) -> None:
        """Do nothing: there is no checksum to compare with."""
