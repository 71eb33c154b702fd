"""A source whose tensors are in memory: a step that was replayed from its log, or weights that training holds.

A read returns what the tensors hold at that time, so nothing may change them while the source is in use. Made by
``opening`` and by ``saved_weights``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..state.layout.fragments import Fragments, dense
from ..state.layout.regions import Region
from ..state.plain_tensors import flat_bytes
from ..state.tensor_entries import TensorEntry
from .source import Source, SourceTensor, StoredArray


class InMemory(Source):
    """A source of whole tensors in memory, copied to the host as they are read, piece by piece."""

    def __init__(
        self,
        path: str,
        format: str,
        atoms: Iterable[tuple[TensorEntry, torch.Tensor]],
        progress: dict[str, Any],
    ) -> None:
        super().__init__(path, format, progress=progress)
        self._tensors: list[torch.Tensor] = []
        self._flat: tuple[int, torch.Tensor] = (-1, torch.empty(0, device="cpu"))
        self._using = threading.Lock()
        for atom, tensor in atoms:
            self._tensors.append(tensor)
            part = self.add_part(StoredArray(path, 0, tensor.nbytes, atom.dtype))
            self.add(
                SourceTensor(atom, Fragments.of([dense(Region.whole(atom.shape), part)], len(atom.shape)))
            )

    def read(self, part: int, offset: int, into: memoryview) -> None:
        with self._using:  # a tensor that is not in C order is copied once
            if self._flat[0] != part:
                self._flat = part, flat_bytes(self._tensors[part])
            flat = self._flat[1]
        np.frombuffer(into, dtype=np.uint8)[:] = flat[offset : offset + len(into)].cpu().numpy()

    def check(self, part: int) -> None:
        """Do nothing: there is no checksum to compare with."""
