"""The state from elsewhere that a fresh run begins from, read tensor by tensor.

Only what the source itself keeps is whole in memory: nothing for files and commits; for a state that log records lead
to, all of it, because ``sources`` has replayed them before.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from ...distributed import Ranks
from ...errors import RunMismatch
from ...optim.declared_state import Slots
from ...state.capture import Captured, buffer_at
from ...state.layout.regions import Region
from ..engine_progress import UserState
from ..model.model_parts import ModelParts


class StartingState(Protocol):
    """A state from any writer, as ``holdfast.From`` opens it."""

    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def progress(self) -> dict[str, Any]: ...
    @property
    def kept(self) -> Mapping[str, frozenset[str] | None]: ...
    @property
    def fresh(self) -> bool:
        """True for the source of a fresh run: what only a resumed run needs may be absent."""
        ...

    def match(self, captured: Captured, optimizer: torch.optim.Optimizer) -> list[str]: ...
    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]: ...
    def check(self, ranks: Ranks) -> None: ...
    def identity(self) -> list[Any]:
        """Return what identifies the state, as JSON. It differs for another state, and for the same state written
        again."""
        ...

    def parameter(self, name: str) -> torch.Tensor | None: ...
    def state(self, name: str, boxes: Mapping[str, Region]) -> dict[str, torch.Tensor]: ...
    def buffer(self, name: str) -> torch.Tensor | None: ...
    def set_hyper_parameters(self, groups: list[dict[str, Any]], names: list[list[str]]) -> bool: ...


class Opens(Protocol):
    def open(self) -> StartingState: ...


def prepare(source: Opens, parts: ModelParts, user: UserState) -> tuple[StartingState, list[str]]:
    """Open ``source``, and check that it fits this model and optimizer.

    Returns the opened state and, as sentences for a person, what it lacks. Raises ``RunMismatch``, with nothing
    changed.
    """
    beginning = source.open()
    user.check_source(beginning.progress)
    told = beginning.match(parts.captured, user.optimizer)
    for unit in parts.all_units:
        for member in unit.trained:
            _refuse_others(beginning, member.name, unit.kept(member))
    return beginning, told


def _refuse_others(beginning: StartingState, name: str, slots: Slots) -> None:
    kept = beginning.kept.get(name)
    here = slots.names
    if kept is not None and kept != here:
        raise RunMismatch(
            f"{beginning.path} has hyper-parameters with which this optimizer keeps {_listed(kept)} for {name}, and"
            f" with those that it was given {_listed(here)}. Build it with those of the source."
        )
    there = beginning.shapes(name)
    for slot, form in slots.tensors.items():
        if there.get(slot, tuple(form.shape)) != tuple(form.shape):
            raise RunMismatch(
                f"{beginning.path} has {slot} of {list(there[slot])} for {name}, and this optimizer keeps"
                f" {list(form.shape)}. Build it as that of the source was, with the same hyper-parameters."
            )


def _listed(slots: Collection[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"


def take_up(beginning: StartingState, told: list[str], captured: Captured, user: UserState) -> None:
    """Set schedule, data position, buffers and hyper-parameters to those of ``beginning``.

    Warns of what ``beginning`` does not have, together with the sentences in ``told``.
    """
    left = user.adopt(beginning.progress)
    for name, place in captured.buffers.items():
        value = beginning.buffer(name)
        if value is not None:
            buffer_at(place).copy_(value)
    if not beginning.set_hyper_parameters(user.optimizer.param_groups, user.group_parameters()):
        told.append("it does not say the hyper-parameters of all groups; the optimizer's stay")
    if not beginning.fresh:
        told += left
    for text in told:
        warnings.warn(f"beginning from {beginning.path}: {text}", stacklevel=6)
