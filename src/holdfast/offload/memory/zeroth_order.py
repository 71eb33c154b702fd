"""The state of a MeZO run between two steps.

How far a step moves the weights is known when it is over, and a block moves when the next step reads it. So after a
step every unit is *behind*: its newest state lacks the last step's ``Delta``, which is in the progress of that step's
commit. Before anything else reads weights, all units catch up. Called by the handlers of MeZO's operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...io.buffers import Buffer
from ...optim.mezo import Delta, pending_of
from ...state.tensor_entries import SEED, STEP
from .block_states import BlockState


class ZerothOrderState:
    """State of one MeZO run. Operations of the update lane use different units."""

    def __init__(self) -> None:
        self._last: Delta | None = None
        self._behind: set[str] = set()
        self.resident: Buffer | None = None
        """Both displaced copies of the prologue and epilogue, during a step, in host memory."""
        self.leaves: list[dict[str, nn.Parameter]] = []
        """Parameters that prologue and epilogue compute with, by stream and name."""
        self.copies: torch.Tensor | None = None
        """The memory that these parameters share."""

    @property
    def is_behind(self) -> bool:
        return bool(self._behind)

    def release(self) -> None:
        """Release all memory."""
        self.resident, self.leaves, self.copies = None, [], None

    def owe(self, delta: Delta, units: Sequence[BlockState]) -> None:
        """Note that a step is over that moves all ``units`` by ``delta``."""
        self._last, self._behind = delta, {unit.name for unit in units}

    def resume(self, progress: Mapping[str, Any], units: Sequence[BlockState]) -> None:
        """Continue from the progress of a commit."""
        delta, _ = pending_of(progress)
        if delta is not None:
            delta.warn_of_other_noise("the resumed run")
            self.owe(delta, units)

    def catch_up(self, unit: BlockState, image: torch.Tensor) -> None:
        """Move ``unit``, whose newest state is ``image``, by the last step, unless it was moved already."""
        if unit.name not in self._behind:
            return
        assert self._last is not None
        for member in unit.trained:
            self._last.apply(*member_state(unit, member.name, image), member.group)
        self._behind.discard(unit.name)


def member_state(
    unit: BlockState, name: str, image: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a parameter, its seed and its count of steps."""
    (tile,) = unit.tiles  # a direction is drawn for a whole parameter
    return tile.view(image, name), tile.view(image, name, SEED), tile.view(image, name, STEP)
