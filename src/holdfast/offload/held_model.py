"""The script's model in an engine's hands: taken over, guarded against use and changes, and given back.

While it is held, the state of training is elsewhere: the model's own parameters are empty, and what the script does to
them would be lost. So the model refuses to run by itself, and steps refuse what has changed since the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..state.capture import Captured
from .model.blocks import install
from .model.quantised_layers import close_layers
from .model.takeover import (
    MARK,
    OriginalDevices,
    TakenModel,
    WatchedModel,
    give_back,
    mark_released,
    refuse_use,
    switch_on_cache,
    take_over,
)
from .runtime import Runtime
from .setup.model_values import ExternalEdits


class HeldModel:
    """A model and its optimizer while one engine trains them.

    Call order: ``take_over``, ``guard``, ``unguard``, ``release``, ``give_back``.
    """

    _watched: WatchedModel

    def __init__(
        self, run: Runtime, captured: Captured, optimizer: torch.optim.Optimizer, caches: list[Any]
    ) -> None:
        """Note where everything is. ``caches`` are the configurations whose key-value cache ``release`` switches on."""
        self._run, self.captured, self._optimizer, self._caches = run, captured, optimizer, caches
        self._homes = OriginalDevices(run.model, captured)
        self._taken = TakenModel(str(run.store.root), self._homes)
        self.were_real = {
            p.name for p in captured.parameters if not p.parameter.is_meta or hasattr(p.parameter, MARK)
        }
        """Names of the parameters that had values when the model was handed over."""
        self.is_owed = False
        """True if the model still lacks its values, because a close was interrupted."""
        self.in_use = False
        """True while the engine runs the model."""
        self._edits: ExternalEdits | None = None
        self._hooks: list[RemovableHandle] = []

    def take_over(self) -> None:
        """Make the model compute with the run's parameters. Raises ``BadInput`` if its own cannot be emptied."""
        take_over(self._run, self.captured, self._taken)
        self._run.absent.refuse_own()

    def guard(self) -> None:
        """Make the model refuse direct use, and watch for changes from here on."""
        run = self._run
        self._watched = WatchedModel(run.model, self.captured, run.resident_leaves, self._optimizer)
        self._edits = ExternalEdits(run, self._optimizer)
        self._hooks = refuse_use(run.model, lambda: self.in_use)

    def refuse_changes(self) -> None:
        """Raise ``BadInput`` if modules, parameters or groups are other ones than when the model was handed over."""
        self._watched.refuse_changes()

    def edited(self) -> list[str]:
        """Return the names of values that the script has changed since the last step."""
        return [] if self._edits is None else self._edits.names()

    def undo_edits(self) -> None:
        """Put the run's values back. Nothing may be under way. Collective: every rank must call this."""
        if self._edits is not None:
            self._edits.undo()

    def unguard(self) -> None:
        """Let the model be used directly. First of all, so that it can be used even if the rest is interrupted."""
        for hook in self._hooks:
            hook.remove()

    def release(self) -> None:
        """Put the model's own parameters and buffers back in their places."""
        for unit in self._run.units:
            for member in unit.all_members:
                install(member.owned, member.owned.captured.parameter)
        self._run.absent.allow_own()
        self._homes.give_back_buffers()
        mark_released(self.captured, self._taken, self.were_real)
        switch_on_cache(self._caches)
        self._edits = None

    def give_back(self, values: dict[str, torch.Tensor]) -> None:
        """Give the model's own parameters the trained ``values``."""
        self._run.absent.allow_own()  # an interrupt may have come before ``release``
        give_back(self.captured, values, self._homes)
        close_layers(self._run.model)
        self.is_owed = False
