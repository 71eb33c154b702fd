"""Buffers with ``persistent=False`` that training changes, as the commits of an engine hold them.

Such a buffer is a constant or a cache that a model makes anew, so no tensor entry holds it. One that a forward pass
changes may be neither: frequencies of a position encoding that follow the longest text so far, for one. It is stored by
value with each commit, with the numbers and small tensors that its module has changed in attributes. Called by the
engine, and by the operation that ends the computation of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...quantities import MiB
from ...state.capture import BufferPlace, changes_of, storable
from ...state.encoding import decode, encode
from ...state.module_attributes import changed_attributes, made_attributes, restore_attributes

MOST_BYTES = MiB // 4
"""The most bytes of a buffer that is stored: it is part of each manifest."""


class BuffersInManifest:
    """The buffers at ``places``, by name, as the script has made them. Created before anything is restored."""

    def __init__(self, places: Mapping[str, BufferPlace]) -> None:
        self._places = dict(places)
        self._made = self._now()
        self._attributes = made_attributes(self._places)
        self._warned: set[str] = set()

    def changed(self) -> dict[str, Any]:
        """Return what has changed since creation, as JSON; empty if nothing has."""
        buffers: dict[str, Any] = {}
        now, same = self._now(), self._as_made()
        for name, (buffer, _) in now.items():
            if name in same:
                continue
            made = self._made.get(name, (None, 0))[0]
            if not storable(buffer) or buffer.nbytes > MOST_BYTES:
                if made is not None:  # else it is a cache
                    self._warn(name)
                continue
            buffers[name] = [encode(buffer.detach().cpu()), buffer is not made]
        if not buffers:
            return {}
        attributes = changed_attributes(self._places, buffers, self._attributes)
        return {"transient": {"buffers": buffers, "attributes": attributes}}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Set the buffers and attributes that ``progress`` has from ``changed``. Those of other models are skipped."""
        found = progress.get("transient", {"buffers": {}, "attributes": {}})
        for name, (value, is_another) in found["buffers"].items():
            if name in self._places:
                self._set(*self._places[name], decode(value), is_another)
        restore_attributes(self._places, found["attributes"])

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Let buffers be moved to a device in the context, which is no change of those that are as they were made."""
        same = self._as_made()
        yield
        self._made |= {name: each for name, each in self._now().items() if name in same}

    def _as_made(self) -> set[str]:
        """Return the names of the buffers that have not changed."""
        return {
            name
            for name, (buffer, changes) in self._now().items()
            if name in self._made and buffer is self._made[name][0] and changes == self._made[name][1]
        }

    def _set(self, module: torch.nn.Module, own: str, value: torch.Tensor, is_another: bool) -> None:
        now = module._buffers.get(own)
        if now is not None and not is_another and now.shape == value.shape:
            with torch.no_grad():
                now.copy_(value)
        else:  # the one that was made may have another name, under which it stays as it is
            module._buffers[own] = value if now is None else value.to(now.device)

    def _now(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return each buffer with the number of its changes in place."""
        return {
            name: (buffer, changes_of(buffer))
            for name, (module, own) in self._places.items()
            if (buffer := module._buffers.get(own)) is not None
        }

    def _warn(self, name: str) -> None:
        """Warn that buffer ``name`` is not stored; once for each buffer."""
        if name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"buffer {name} is registered with persistent=False, training changes it, and it is too large or of a kind"
            " that commits do not hold: a resume begins with what the model makes. Register it with persistent=True if"
            " it is a part of the training state.",
            stacklevel=6,
        )
