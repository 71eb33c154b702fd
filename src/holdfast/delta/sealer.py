"""Sealer: makes of a step that was done what its record holds. Nothing of that changes any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..accelerators import devices_of
from ..errors import BadInput
from ..state.growing import shorten
from ..state.live import LiveState
from .drift import digest
from .image import image_of
from .leaving import Leaving
from .recorder import Sealed
from .replay import hashed, sampled
from .tap import Update

SAMPLES = ""
"""The key of what the fingerprint is made of, among those of buffers."""


class Sealer:
    """Of one run: buffers are recorded where they are not as they were when they were last. So are long texts of the
    script, if ``shortens``: of one that was gone on with, what was added."""

    def __init__(self, state: LiveState, shortens: bool = False) -> None:
        self._digests: dict[str, str] = {}
        self._shortens = shortens
        self._progress: dict[str, Any] | None = None
        """Of the record before, with texts as they are; None if the next is to stand without it."""
        self._forgotten = False
        self._kinds = {key: (atom.dtype, atom.shape) for key, (atom, _) in state.buffers().items()}

    def forget(self) -> None:
        """The next record follows a base, whatever was recorded before it."""
        self._forgotten = True

    def seal(
        self, state: LiveState, step: int, updates: Sequence[Update], progress: dict[str, Any], base_step: int
    ) -> Sealed:
        """``step``, which ``state`` is at. What is on a device is put into it when it has left that."""
        parts, slots = [], []
        forgotten, self._forgotten = self._forgotten, False
        told = shorten(progress, None if forgotten else self._progress)
        self._progress = progress if self._shortens else None
        about: dict[str, Any] = {"base": base_step, "updates": [], "buffers": None, "progress": told}
        for update in updates:
            assert update.slot is not None and update.part is not None
            about["updates"].append({**update.about(), "part": len(parts)})
            parts.append(update.part)
            if update.slot not in slots:
                slots.append(update.slot)
        seen = self._buffers(state) | {SAMPLES: sampled(state.stored, step)}
        sealed = Sealed(step, about, tuple(parts), tuple(slots))
        if devices_of(seen.values()):
            leaving = Leaving(seen)
            sealed.finish = lambda: self._put(sealed, leaving.arrived(), forgotten)
            sealed.late_bytes = sum(tensor.nbytes for tensor in seen.values())
        else:
            self._put(sealed, seen, forgotten)
        return sealed

    def _put(self, sealed: Sealed, seen: dict[str, torch.Tensor], forgotten: bool) -> None:
        """Into the record what was ``seen``: fingerprint, and buffers that changed. In the order of steps."""
        if forgotten:
            self._digests.clear()
        samples, changed = seen.pop(SAMPLES), {}
        for key, tensor in seen.items():
            now = digest(tensor)
            if self._digests.get(key) != now:
                self._digests[key] = now
                changed[key] = tensor
        if changed:
            sealed.about["buffers"] = len(sealed.parts)
            sealed.parts += (image_of(changed),)
        sealed.about["fingerprint"] = hashed(samples)

    def _buffers(self, state: LiveState) -> dict[str, torch.Tensor]:
        """All buffers, of the shapes and dtypes that they had."""
        found = {}
        for key, (atom, tensor) in state.buffers().items():
            now = (atom.dtype, atom.shape)
            was = self._kinds.setdefault(key, now)
            if now != was:
                raise BadInput(
                    f"buffer {atom.name} was {_told(was)} and is {_told(now)} now, which a resume could not put back."
                    " Give it its final shape and dtype, or register it with persistent=False."
                )
            found[key] = tensor
        return found


def _told(kind: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = kind
    return f"{dtype} {shape}"
