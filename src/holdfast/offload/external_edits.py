"""Detection of changes that a script makes to a model between two steps, which never reach the run.

A run keeps its values elsewhere: blocks are empty between steps, and the resident part in memory is a copy that the
next update overwrites. So a change is refused by name, and the run's values are put back. A parameter is compared by
identity, version and memory, which takes a microsecond. Changes through ``.data`` or NumPy alter none of these and are
not detected.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from .model.blocks import Owned, install
from .runtime import Runtime
from .setup.export import values_of


class ExternalEdits:
    """Changes of one engine's model and optimizer since it was built or since ``undo``."""

    def __init__(self, run: Runtime, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._optimizer = run, optimizer
        leaves = run.resident_leaves
        self._held: list[tuple[str, Owned, nn.Parameter]] = [
            (m.name, m.owned, leaves.get(m.name, m.owned.captured.parameter))
            for unit in run.units
            for m in unit.members
        ]
        self._memory = [parameter.data for _, _, parameter in self._held]
        self._look()

    def _look(self) -> None:
        self._seen = [_form(parameter) for _, _, parameter in self._held]
        self._state = self._optimizer.state
        self._buffers = [
            (module, key, buffer)
            for module in self._run.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def found(self) -> list[str]:
        """Return the names of what was changed, for a person."""
        told = [
            f"parameter {name}"
            for (name, owned, parameter), seen in zip(self._held, self._seen, strict=True)
            if _form(parameter) != seen
            or any(module._parameters.get(key) is not parameter for module, key in owned.places)
        ]
        if self._optimizer.state is not self._state:
            told.append("the optimizer's state")
        if not told:
            self._look()
        return told

    def undo(self) -> None:
        """Put the run's values back. Nothing may be under way.

        Collective: every rank must call this.
        """
        values = values_of(self._run, len(self._run.units) - 1)
        for (name, owned, parameter), memory in zip(self._held, self._memory, strict=True):
            install(owned, parameter)
            parameter.data = memory
            if name in values:
                memory.copy_(values[name])
        for module, key, buffer in self._buffers:
            now = module._buffers.get(key)
            if now is not None and now.dtype != buffer.dtype:  # by Module.half() and the like
                module._buffers[key] = buffer
        self._look()


def _form(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return values that differ after the parameter was changed in place or got other memory."""
    return parameter._version, parameter.dtype, None if parameter.is_meta else parameter.data_ptr()


def told(found: Collection[str]) -> str:
    """Return the message about edits, without the advice."""
    first, more = min(found), f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{first}{more} changed outside of engine.step (in place, by load_state_dict, or another one is there), and the"
        " run has its values elsewhere, where that does not reach"
    )
