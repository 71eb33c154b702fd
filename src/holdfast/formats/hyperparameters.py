"""Hyper-parameters that a source has for the live parameter groups, and the state that optimizers keep under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import BadInput
from ..optim.kinds import IMPLEMENTATION, kept_slots
from ..state.encoding import decode
from ..state.progress import fill_groups
from .entry_matching import groups_of


def set_hyper_parameters(
    groups: list[dict[str, Any]], names: list[list[str]], progress: Mapping[str, Any]
) -> bool:
    """Set the hyper-parameters of each group from a source and return whether all groups could be set.

    A group is set only where the source has the same values for all its parameters.

    Args:
        groups: The live parameter groups, changed in place.
        names: For each group, the names of its trained parameters in the source.
        progress: The progress of the source.
    """
    found = _options(groups, names, progress)
    fill_groups(groups, [options or {} for options in found])
    return None not in found


def kept_by(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    progress: Mapping[str, Any],
    there: Mapping[str, str],
) -> dict[str, frozenset[str] | None]:
    """Return, by name, the state names that ``optimizers`` will keep for their parameters; None where that is unknown.

    Args:
        optimizers: The live optimizers.
        names: Names of the parameters by id.
        progress: The progress of the source, whose hyper-parameters will apply.
        there: The name in the source of each live name.
    """
    found: dict[str, frozenset[str] | None] = {}
    for optimizer in optimizers:
        groups = optimizer.param_groups
        members = [[p for p in group["params"] if id(p) in names] for group in groups]
        theirs = [[there.get(names[id(p)], "") for p in group] for group in members]
        for group, parameters, options in zip(
            groups, members, _options(groups, theirs, progress), strict=True
        ):
            known = {
                dims: kept_slots(optimizer, {**group, **(options or {})}, dims)
                for dims in {p.dim() for p in parameters}
            }
            found |= {names[id(p)]: known[p.dim()] for p in parameters}
    return found


def _options(
    groups: list[dict[str, Any]], names: list[list[str]], progress: Mapping[str, Any]
) -> list[dict[str, Any] | None]:
    """Return what would be set in each group; None where the source has no values or differing ones."""
    of_name: dict[str, dict[str, Any]] = {}
    for group, members in groups_of(progress):
        options = {k: v for k, v in group.items() if k not in IMPLEMENTATION}
        of_name |= dict.fromkeys(members, options)
    found: list[dict[str, Any] | None] = []
    for group, members in zip(groups, names, strict=True):
        theirs = [of_name.get(name) for name in members]
        if None in theirs or any(each != theirs[0] for each in theirs):
            found.append(None)
            continue
        options = theirs[0] or {} if theirs else {}
        options = {k: v for k, v in options.items() if k in group}
        _refuse_objects(options, members)
        found.append({k: _like(group[k], decode(v)) for k, v in options.items()})
    return found


def _like(own: Any, value: Any) -> Any:
    """Return a list as a tuple where ``own`` is a tuple: flattened files do not say which it was."""
    return tuple(value) if isinstance(own, tuple) and isinstance(value, list) else value


def _refuse_objects(options: dict[str, Any], names: list[str]) -> None:
    """Raise ``BadInput`` if one of ``options`` is not stored by value, because no optimizer could work with it."""
    for key, value in options.items():
        if isinstance(value, dict) and "__object__" in value:
            raise BadInput(
                f"the hyper-parameter {key!r} of {names[0]} is an object ({value['__object__']}) in the source, which"
                " is not read by value. Load it with its own library and save a plain number in its place."
            )
