"""Hidden: what an optimizer keeps where neither its state nor its groups have it, so that no resume brings it back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import BadInput
from ..state.atoms import CARRIED
from .unseen import changes_of

RESERVED = ("param", "buffer", *CARRIED)
"""Slots that are no optimizer's."""


KEPT = ("state", "param_groups", "defaults")
"""Attributes of an optimizer that are no hidden ones."""


Marks = list[tuple[Any, Any]]
"""Of the things in an attribute: a tensor or generator, or None, and what is another one when it has changed."""


def hidden_in(optimizer: torch.optim.Optimizer) -> dict[str, Marks]:
    """Its attributes that are numbers, tensors (but parameters and state) and random generators, or hold some in a list
    or dict, by name."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held |= {id(value) for slots in optimizer.state.values() for value in slots.values()}
    found: dict[str, Marks] = {}
    for name, value in vars(optimizer).items():
        items = [] if name in KEPT else _items(value)
        marks = [mark for item in items if id(item) not in held and (mark := _mark(item)) is not None]
        if marks:
            found[name] = marks
    return found


def _items(value: Any) -> list[Any]:
    """What is in it, or it."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _mark(value: Any) -> tuple[Any, Any] | None:
    if isinstance(value, torch.Tensor):
        return value, changes_of(value)
    if isinstance(value, torch.Generator):
        return value, value.get_state().tolist()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (None, value) if is_number and value == value else None


def _changed(before: Marks | None, now: Marks) -> bool:
    """A number that came with the step is nothing that steps depend on."""
    if before is None:
        return any(thing is not None for thing, _ in now)
    pairs = zip(before, now, strict=False)
    return len(before) != len(now) or any(a is not b or m != n for (a, m), (b, n) in pairs)


def told_of_hidden(
    optimizers: Sequence[torch.optim.Optimizer], before: Sequence[Mapping[str, Marks]]
) -> None:
    """After a step, ``before`` which the attributes were others: warn of those that changed.

    Raises ``BadInput`` for state that belongs to no parameter, or under a name that no optimizer can have.
    """
    for optimizer, was in zip(optimizers, before, strict=True):
        kind = type(optimizer).__name__
        odd = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        if odd:
            raise BadInput(
                f"{kind} keeps state[{odd[0]!r}], which belongs to no parameter, so commits could not hold it. Keep it"
                " in the state of a parameter, or in param_groups."
            )
        names = {name for held in optimizer.state.values() for name in held}
        if not optimizer.state and optimizer.state_dict().get("state"):
            raise BadInput(
                f"{kind} keeps its state elsewhere than in {kind}.state, which is empty after a step, so commits could"
                " not hold it. Give the optimizer inside of it whose step() updates parameters."
            )
        taken = [name for name in names if not isinstance(name, str) or name in RESERVED or "/" in name]
        if taken:
            raise BadInput(
                f"{kind} keeps state under the name {taken[0]!r}, which commits need for themselves:"
                " keep it under another"
            )
        changed = [name for name, marks in hidden_in(optimizer).items() if _changed(was.get(name), marks)]
        if changed:
            warnings.warn(
                f"{kind}.{changed[0]} was changed by a step, and is neither in its state nor in param_groups: a resume"
                " would not bring it back. If steps depend on it, keep it there.",
                stacklevel=5,
            )
