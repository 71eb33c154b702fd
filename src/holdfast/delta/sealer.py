"""Sealer: makes of a step that was done what its record holds. Nothing of that changes any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import BadInput
from ..state.live import LiveState
from .drift import digest
from .image import image_of
from .recorder import Sealed
from .replay import fingerprint
from .tap import Update


class Sealer:
    """Of one run: buffers are recorded where they are not as they were when they were last."""

    def __init__(self, state: LiveState) -> None:
        self._digests: dict[str, str] = {}
        self._shapes = {key: tensor.shape for key, (_, tensor) in state.buffers().items()}

    def forget(self) -> None:
        """The next record follows a base, whatever was recorded before it."""
        self._digests.clear()

    def seal(
        self, state: LiveState, step: int, updates: Sequence[Update], progress: dict[str, Any], base_step: int
    ) -> Sealed:
        """``step``, which ``state`` is at."""
        parts, slots = [], []
        about: dict[str, Any] = {"base": base_step, "updates": []}
        for update in updates:
            assert update.slot is not None and update.part is not None
            about["updates"].append({**update.about(), "part": len(parts)})
            parts.append(update.part)
            if update.slot not in slots:
                slots.append(update.slot)
        changed = self._changed(state)
        about["buffers"] = len(parts) if changed else None
        if changed:
            parts.append(image_of(changed))
        about["progress"] = progress
        about["fingerprint"] = fingerprint(state.stored, step)
        return Sealed(step, about, tuple(parts), tuple(slots))

    def _changed(self, state: LiveState) -> dict[str, torch.Tensor]:
        """The model's buffers to be recorded."""
        changed = {}
        for key, (_, tensor) in state.buffers(beside=False).items():
            was = self._shapes.setdefault(key, tensor.shape)
            if tensor.shape != was:
                raise BadInput(
                    f"buffer {key.rpartition('/')[0]} was {tuple(was)} and is {tuple(tensor.shape)} now, which a resume"
                    " could not put back. Give it its final shape, or register it with persistent=False."
                )
            now = digest(tensor)
            if self._digests.get(key) != now:
                self._digests[key] = now
                changed[key] = tensor
        return changed
