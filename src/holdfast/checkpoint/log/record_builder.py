"""The builder of log records: it turns a completed step into a record.

A record is immutable and builds on the one before it: it has the buffers that have changed, and the new end of a text
that grew. Called by ``DurabilityBackend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...accelerators import devices_of
from ...errors import BadInput
from ...state.encoding import shorten
from ...state.live_state import LiveState
from ..capture.async_copy import AsyncHostCopy
from ..capture.optimizer_hooks import Update
from ..capture.state_digests import digest
from ..recovery.replay import FlatViews, hashed, sampled
from ..snapshot.snapshot_image import image_of
from .recorder import FinalizedStep

SAMPLES = ""
"""The key, beside those of buffers, of the bytes from which the fingerprint is made."""


class RecordBuilder:
    """The builder of one run's records.

    Buffers are recorded when they differ from the last recorded value. With ``shortens``, so are long texts of the
    script: of a text that grew only the addition is recorded.
    """

    def __init__(self, state: LiveState, shortens: bool = False) -> None:
        self._digests: dict[str, str] = {}
        self._views = FlatViews()
        self._shortens = shortens
        self._progress: dict[str, Any] | None = None
        """The progress of the record before, with full texts; None if the next record must not depend on it."""
        self._forgotten = False
        self._kinds = {key: (atom.dtype, atom.shape) for key, (atom, _) in state.buffers().items()}

    def forget(self) -> None:
        """Make the next record independent of earlier ones, because it follows a snapshot."""
        self._forgotten = True

    def seal(
        self, state: LiveState, step: int, updates: Sequence[Update], progress: dict[str, Any], base_step: int
    ) -> FinalizedStep:
        """Build the record of ``step``, at which ``state`` is.

        Data on a device is added to the record once it has left the device.
        """
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
        seen = self._buffers(state) | {SAMPLES: sampled(state.stored, step, self._views)}
        sealed = FinalizedStep(step, about, tuple(parts), tuple(slots))
        if devices_of(seen.values()):
            leaving = AsyncHostCopy(seen)
            sealed.finish = lambda: self._put(sealed, leaving.arrived(), forgotten)
            sealed.late_bytes = sum(tensor.nbytes for tensor in seen.values())
        else:
            self._put(sealed, seen, forgotten)
        return sealed

    def _put(self, sealed: FinalizedStep, seen: dict[str, torch.Tensor], forgotten: bool) -> None:
        """Add to the record the fingerprint and the changed buffers among ``seen``. Called in the order of steps."""
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
        """Return all buffers. Raises ``BadInput`` for one whose shape or dtype has changed."""
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
