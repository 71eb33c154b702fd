"""Non-persistent buffers: which of them forward passes change, and what their modules keep beside them.

A buffer with ``persistent=False`` is a constant or a cache, which a model makes anew. One that changes from step to
step is neither. From the step at which that is first seen, the run carries it like any other buffer, with the numbers
and small tensors in its module's attributes. Where that is impossible, a warning says so at that step. Called by the
training thread, at the end of each step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...quantities import MiB
from ...state.capture import storable
from ...state.encoding import decode
from ...state.live_state import LiveState
from .mutation_check import changes_of
from .optimizer_attributes import encoded_leaf

MOST_BYTES = 16 * MiB
"""The most bytes of such buffers, together, that are copied in every step."""

SMALL = 16
"""The most elements of a tensor in an attribute that is kept."""

Kind = tuple[torch.dtype, torch.Size]


class TransientBuffers:
    """The non-persistent buffers of the model of one training loop, which is ``alone`` if it has one process."""

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self.carried: set[str] = set()
        """Names of the buffers that the run carries."""
        self._rebound: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._emptied: set[str] = set()
        """Names of buffers that were carried and then became None."""
        self._marks: dict[str, tuple[int, int]] = {}
        self._kinds: dict[str, Kind] | None = None
        """Dtype and shape of the buffers that the model was made with; a resume can restore only these."""
        self._attributes: dict[str, dict[str, Any]] = {}
        """The attributes of each module when it was made, as JSON."""

    def begin(self, state: LiveState) -> None:
        """Record the buffers and attributes that the model was made with."""
        kinds: dict[str, Kind] = {}
        for name, (module, own) in state.passing.items():
            buffer = module._buffers.get(own)
            if buffer is not None and storable(buffer):
                kinds[name] = (buffer.dtype, buffer.shape)
            self._attributes.setdefault(_above(name), _small_attributes(module))
        if self._kinds is None:
            self._kinds = kinds

    def accept(self, state: LiveState) -> None:
        """Accept the current buffers as the start of the run, including those that ``state`` carries."""
        self.carried |= state.carried
        self._rebound |= state.rebound
        self._marks = self._now(state)

    def _now(self, state: LiveState) -> dict[str, tuple[int, int]]:
        found = {}
        for name, (module, own) in state.passing.items():
            buffer = module._buffers.get(own)
            if buffer is not None:
                found[name] = (id(buffer), changes_of(buffer))
        return found

    def look(self, state: LiveState) -> bool:
        """Return whether this step changed the set of carried buffers, and with it the form of the state."""
        if not state.passing:
            return False
        before, self._marks = self._marks, self._now(state)
        if before == self._marks:
            return False
        carried = set(self.carried)
        self.drop_emptied(state)
        for name, mark in self._marks.items():
            if before.get(name) != mark:
                self._see_changed(state, name, is_other=before.get(name, mark)[0] != mark[0])
        return carried != self.carried

    def drop_emptied(self, state: LiveState) -> None:
        """Stop carrying the buffers that are None now, with a warning."""
        for name in sorted(self.carried & state.passing.keys()):
            module, own = state.passing[name]
            if module._buffers.get(own) is None:
                self._emptied.add(name)
                self.carried.discard(name)
                state.drop_carried(name)
                self._tell(
                    name,
                    "It is None now, so it is not in the run any more: a resume begins with what the model makes.",
                )

    def _see_changed(self, state: LiveState, name: str, is_other: bool) -> None:
        module, own = state.passing[name]
        buffer = module._buffers[own]
        assert buffer is not None
        if is_other:
            self._rebound.add(name)
        why = self._why_not(state, name, buffer)
        if why:
            self.carried.discard(name)
            self._tell(
                name, f"It is not in the run, since {why}: a resume begins with what the model makes anew."
            )
        elif name not in self.carried:
            self.carried.add(name)
            self._tell(
                name, "From this step on it is in the run, with numbers that its module keeps in attributes."
            )

    def _why_not(self, state: LiveState, name: str, buffer: torch.Tensor) -> str:
        if not self._alone:
            return "it is on several ranks"
        if not storable(buffer):
            return "it is of a kind that commits do not hold"
        if name in self._emptied:
            return "it is None at times"
        if self._kinds is None or name not in self._kinds:
            return "the model was made without it"
        if (buffer.dtype, buffer.shape) != self._kinds[name]:
            return "its shape or type changes"
        sizes = [state.passing[each] for each in {*self.carried, name}]
        if (
            sum(found.nbytes for module, own in sizes if (found := module._buffers.get(own)) is not None)
            > MOST_BYTES
        ):
            return f"such buffers have more than {MOST_BYTES // MiB} MiB"
        return ""

    def _tell(self, name: str, text: str) -> None:
        if (name, text) in self._told:
            return
        self._told.add((name, text))
        warnings.warn(
            f"buffer {name} is registered with persistent=False, and iterations change it. {text} Register it with"
            " persistent=True if it is a part of the training state.",
            stacklevel=6,
        )

    def recorded_attributes(self, state: LiveState) -> dict[str, Any]:
        """Return the module attributes that records hold for carried buffers, as JSON; empty without such buffers."""
        if not self.carried:
            return {}
        modules: dict[str, dict[str, Any]] = {}
        for name in sorted(self.carried & state.passing.keys()):
            above, module = _above(name), state.passing[name][0]
            made, now = self._attributes.get(above, {}), _small_attributes(module)
            modules[above] = {key: value for key, value in now.items() if made.get(key) != value}
        return {"modules": modules, "rebound": sorted(self._rebound & self.carried)}

    def restore(self, state: LiveState, progress: Mapping[str, Any]) -> None:
        """Restore the module attributes that ``told`` returned."""
        module_of = {_above(name): module for name, (module, _) in state.passing.items()}
        for above, attributes in progress.get("modules", {}).items():
            module = module_of.get(above)
            for name, value in attributes.items() if module is not None else ():
                setattr(module, name, decode(value))


def _above(name: str) -> str:
    return name.rpartition(".")[0]


def _small_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes that are numbers or small tensors, as JSON."""
    found, buffers = {}, set(map(id, module._buffers.values()))  # another name of a buffer remains one
    for name, value in vars(module).items():
        is_number = type(value) in (bool, int, float)
        is_small = type(value) is torch.Tensor and value.numel() <= SMALL and id(value) not in buffers
        if name != "training" and (is_number or is_small) and (encoded := encoded_leaf(value)) is not None:
            found[name] = encoded
    return found
