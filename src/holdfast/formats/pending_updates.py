"""The last update of a MeZO commit, which its files lack and which is computed while they are read.

The commit stores the update in its progress as one number for all parameters. The direction is drawn again from the
seed and the step count that each parameter keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import Damaged
from ..optim.mezo import pending_of
from ..state.tensor_entries import PENDING, SEED, STEP
from .source import SourceTensor

ReadPart = Callable[[int, int, memoryview], None]
"""A function that fills a buffer with the stored bytes of a part, from an offset on."""


class PendingUpdates:
    """The pending update of one commit, whose parts are whole tensors."""

    def __init__(
        self, progress: dict[str, Any], atoms: Mapping[str, SourceTensor], read: ReadPart, path: str
    ) -> None:
        """Remove the update from ``progress``, so that readers see none.

        Raises ``Damaged``, which names ``path``, if the update is malformed or names parameters that are not in
        ``atoms``.
        """
        self._atoms, self._read = atoms, read
        self._changed: dict[int, tuple[str, str]] = {}
        """Parameter and slot of each part that the last step changed."""
        try:
            self._delta, self._groups = pending_of(progress)
            for name, group in self._groups.items():
                self._take(name, group)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise Damaged(
                f"{path} has an update of MeZO that does not read as one ({type(error).__name__}: {error})",
                path=path,
            ) from error
        progress.pop(PENDING, None)
        if self._delta is not None:
            self._delta.warn_of_other_noise(path)

    def _take(self, name: str, group: int) -> None:
        assert self._delta is not None
        numbers = [self._delta.groups[group][each] for each in ("lr", "weight_decay")]
        if self._delta.slope is not None:
            numbers.append(self._delta.slope)
        for number in numbers:
            math.isnan(number)  # raises for anything that is no float
        self._part(name, SEED)  # raises if there is no seed
        self._changed |= {self._part(name, slot): (name, slot) for slot in ("param", STEP)}

    def apply(self, part: int, offset: int, into: memoryview) -> None:
        """Update stored bytes of a part, from ``offset`` on, to their values after the last step."""
        if part not in self._changed or not into.nbytes:
            return
        assert self._delta is not None
        (name, slot), values = self._changed[part], torch.frombuffer(into, dtype=torch.float32)
        if slot == STEP:
            values.add_(1)
            return
        seed, step = self._scalar(name, SEED, torch.int64), self._scalar(name, STEP, torch.float32)
        elements = self._atoms[f"{name}/param"].atom.elements
        self._delta.apply_part(values, offset // 4, elements, seed, step, self._groups[name])

    def _part(self, name: str, slot: str) -> int:
        return int(self._atoms[f"{name}/{slot}"].pieces.part[0])

    def _scalar(self, name: str, slot: str, dtype: torch.dtype) -> int:
        data = bytearray(dtype.itemsize)
        self._read(self._part(name, slot), 0, memoryview(data))
        return int(torch.frombuffer(data, dtype=dtype))
