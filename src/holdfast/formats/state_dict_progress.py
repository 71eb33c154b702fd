"""Progress of a source, from the entries of a nested state dict that are small or no tensors.

``keys`` has found the role of each entry. What writers flattened, as ``torch.distributed.checkpoint`` does, is nested
again here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from .entry_keys import PROGRESS, Path, TensorRoles, in_list, inside, numbered_name, state_of
from .foreign_progress import told_progress

STEPS = ("step", "global_step", "train_step", "iteration", "iter_num")
SCHEDULERS = ("scheduler", "lr_scheduler", "sched", "lr_schedulers", "schedulers")
INTEGERS = ("I64", "I32", "I16")


def progress_of(
    values: Mapping[str, Any], paths: Mapping[str, Path], named: TensorRoles, where: str
) -> dict[str, Any]:
    """Return the progress (as in ``Source``) that the entries without tensors, or with small ones, contain.

    Raises ``Damaged``.

    Args:
        values: The entries by key, as JSON.
        paths: The path of each entry.
        named: The roles of the entries.
        where: The name of the source, for messages.
    """
    own = told_progress(values.get(PROGRESS), PROGRESS, where)
    progress: dict[str, Any] = {**own, "roots": named.roots}
    groups = [] if "replay" in own else _groups_of(values, paths, named)  # a Checkpointer keeps its own
    if groups:
        progress["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        progress["group_parameters"] = [group.get("params", []) for group in groups]
    states: dict[str, dict[str, Any]] = {}
    rest = {}
    for key, value in values.items():
        state = state_of(key, paths[key], named.optimizers)
        if state is not None and key not in named.tensors:
            name = named.numbers.get(state[0], numbered_name(key, state[0]))
            states.setdefault(named.plain(name), {})[state[1]] = value
        elif not inside(key, named.optimizers) and key != PROGRESS:
            rest[key] = value
    if states or "replay" in own:
        progress["values"] = states
    _take_scheduler(progress, rest, paths)
    steps = [key for key in rest if _step_in(key, rest[key]) is not None]
    if steps:
        first = min(steps, key=_rank_of_step)
        progress["step"] = _step_in(first, rest[first])
    if rest:
        progress["extra"] = rest
    return progress


def _step_in(key: str, value: Any) -> int | None:
    """Return the step that an entry holds, judged by its name; None if it holds none."""
    if key.rpartition(".")[2] not in STEPS:
        return None
    if isinstance(value, dict) and value.get("shape") in ([], [1]) and value.get("__tensor__") in INTEGERS:
        value = int.from_bytes(base64.b64decode(value["bytes"]), "little", signed=True)
    return value if type(value) is int and value >= 0 else None


def _rank_of_step(key: str) -> tuple[int, bool, int]:
    """Return a sort key for steps: the shallowest first, and ``global_step`` before others.

    A plain ``step`` may count within an epoch.
    """
    return key.count("."), key.rpartition(".")[2] != "global_step", len(key)


class _Nested(dict[Any, Any]):
    """A dictionary or list that was flattened."""


def _take_scheduler(progress: dict[str, Any], rest: dict[str, Any], paths: Mapping[str, Path]) -> None:
    """Move the scheduler's entries from ``rest`` to ``progress``, nested again.

    Of several candidates the first of the outermost is used. A text or number with such a name belongs to a
    configuration.
    """
    places: dict[str, int] = {}
    for key, value in rest.items():
        place = next((i for i, name in enumerate(paths[key]) if name in SCHEDULERS), None)
        if place is not None and (place < len(paths[key]) - 1 or isinstance(value, dict | list)):
            places[key] = place
    outermost = min(places, key=lambda key: places[key], default="")
    found = _Nested()
    for key, place in places.items():
        path = paths[key]
        if path[: place + 1] == paths[outermost][: place + 1]:
            _put(found, ("scheduler", *path[place + 1 :]), rest.pop(key))
    progress |= _unflattened(found)
    match progress.get("scheduler"):
        case [only]:  # Lightning: a list by optimizer
            progress["scheduler"] = only


def _put(table: _Nested, way: Path, value: Any) -> None:
    """Store ``value`` at the path ``way`` below ``table``."""
    for name in way[:-1]:
        table = table.setdefault(name, _Nested())
    table[way[-1]] = value


def _unflattened(value: Any) -> Any:
    if not isinstance(value, _Nested):
        return value
    if value and value.keys() == set(range(len(value))):
        return [_unflattened(value[place]) for place in sorted(value)]
    return {str(name): _unflattened(item) for name, item in value.items()}


def _groups_of(
    values: Mapping[str, Any], paths: Mapping[str, Path], named: TensorRoles
) -> list[dict[str, Any]]:
    """Return hyper-parameters by group, with the names of the parameters."""
    found: list[dict[str, Any]] = []
    for root in named.optimizers:
        start = f"{root}param_groups"
        if isinstance(values.get(start), list):
            found += [dict(group) for group in values[start]]
            continue
        listed: dict[int, _Nested] = {}
        single: dict[str, dict[str, Any]] = {}
        for key in values:
            if not key.startswith(f"{start}."):
                continue
            if in_list(paths[key]) and values[key] != {}:
                place = next(i for i, name in enumerate(paths[key]) if name == "param_groups")
                _put(
                    listed.setdefault(paths[key][place + 1], _Nested()), paths[key][place + 2 :], values[key]
                )
            else:
                name, _, option = key.removeprefix(f"{start}.").rpartition(".")
                single.setdefault(name, {})[option] = values[key]
        by_list = [{str(k): _unflattened(v) for k, v in listed[i].items()} for i in sorted(listed)]
        found += by_list or _joined_groups(single)  # both hold the same, where both exist
    for group in found:
        if "params" in group:
            group["params"] = [
                named.plain(named.numbers.get(str(name), str(name))) for name in group["params"]
            ]
    return found


def _joined_groups(single: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one group for each set of parameters with equal hyper-parameters."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, options in single.items():
        text = json.dumps(options, sort_keys=True)
        groups.setdefault(text, (options, []))[1].append(name)
    return [{**options, "params": names} for options, names in groups.values()]
