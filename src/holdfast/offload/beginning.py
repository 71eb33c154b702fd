"""Beginning: a state from elsewhere that a fresh run begins from, unit by unit, never whole in memory."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from ..errors import RunMismatch
from ..state.capture import Captured, buffer_at
from .progress import UserState
from .units import Unit


class Beginning(Protocol):
    """A state, whoever wrote it, as ``holdfast.From`` opens it."""

    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def progress(self) -> dict[str, Any]: ...
    def match(self, captured: Captured) -> list[str]: ...
    def check(self) -> None: ...
    def parameter(self, name: str) -> torch.Tensor | None: ...
    def state(self, name: str) -> dict[str, torch.Tensor]: ...
    def buffer(self, name: str) -> torch.Tensor | None: ...
    def set_hyper_parameters(self, groups: list[dict[str, Any]], names: list[list[str]]) -> bool: ...


class Opens(Protocol):
    def open(self) -> Beginning: ...


def prepare(source: Opens, captured: Captured, user: UserState) -> Beginning:
    """Open ``source``, see that it is of this model and whole, and put hyper-parameters, schedule, position and buffers
    where it has them. What it does not have is told in warnings.

    Raises ``RunMismatch`` or ``Damaged``, with nothing changed.
    """
    beginning = source.open()
    user.check_place(beginning.progress)
    told = beginning.match(captured)
    beginning.check()
    if not beginning.set_hyper_parameters(user.optimizer.param_groups, user.group_parameters()):
        told.append("it does not say the hyper-parameters of all groups; the optimizer's stay")
    told += [
        f"it has no {name}; that of the script goes on as it is" for name in user.adopt(beginning.progress)
    ]
    for name, place in captured.buffers.items():
        value = beginning.buffer(name)
        if value is not None:
            buffer_at(place).copy_(value)
    for text in told:
        warnings.warn(f"beginning from {beginning.path}: {text}", stacklevel=4)
    return beginning


def state_of(beginning: Beginning, unit: Unit, name: str) -> dict[str, torch.Tensor]:
    """What the optimizer held for a trained parameter. Raises ``RunMismatch`` if this one does not hold that."""
    [member] = [member for member in unit.trained if member.name == name]
    slots, found = unit.member_slots(member), beginning.state(name)
    unknown = found.keys() - {*slots.tensors, *slots.scalars}
    if unknown:
        raise RunMismatch(
            f"{beginning.path} has {name}/{min(unknown)}, which this optimizer does not keep. Give the optimizer that"
            " it was made with."
        )
    return found
