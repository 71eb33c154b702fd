"""Hidden: what an optimizer keeps where neither its state nor its groups have it, so that no resume brings it back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import BadInput
from ..state.live import CARRIED

RESERVED = ("param", "buffer", *CARRIED)
"""Slots that are no optimizer's."""


def hidden_numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its attributes that are numbers, by name."""
    plain = vars(optimizer).items()
    return {
        name: v for name, v in plain if isinstance(v, (int, float)) and not isinstance(v, bool) and v == v
    }


def told_of_hidden(optimizers: Sequence[torch.optim.Optimizer], before: Sequence[dict[str, Any]]) -> None:
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
        taken = [name for name in names if not isinstance(name, str) or name in RESERVED or "/" in name]
        if taken:
            raise BadInput(
                f"{kind} keeps state under the name {taken[0]!r}, which commits need for themselves:"
                " keep it under another"
            )
        changed = [name for name, value in hidden_numbers(optimizer).items() if was.get(name, value) != value]
        if changed:
            warnings.warn(
                f"{kind}.{changed[0]} was changed by a step, and is neither in its state nor in param_groups: a resume"
                " would not bring it back. If steps depend on it, keep it there.",
                stacklevel=5,
            )
