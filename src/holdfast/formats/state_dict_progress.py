"""Progress of a source: step, scheduler, hyper-parameters and other values, from what foreign files hold.

``entry_keys`` has found the role of each entry of a state dict. What writers flattened, as
``torch.distributed.checkpoint`` does, is nested again here, and small tensors that belong neither to the model nor to
its optimizer are stored by value. Everything is checked before use: the files may hold anything, and a bad value raises
``Damaged``. Called by the readers.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import Damaged, HoldfastError
from ..quantities import KiB
from ..state.encoding import decode, tensor_json
from .entry_keys import EXTRA, PROGRESS, Path, TensorRoles, in_list, inside, numbered_name, state_of
from .entry_matching import groups_of
from .load import read_flat
from .source import Source, SourceTensor

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
    own = parsed_progress(values.get(PROGRESS), PROGRESS, where)
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


SMALL_BYTES = 16 * KiB


def add_or_tell(source: Source, key: str, stored: SourceTensor, values: dict[str, Any]) -> None:
    """Add ``stored`` to ``source`` as a tensor entry, or to ``values`` by ``key`` if it is small and extra.

    Raises ``Damaged`` if its fragments do not cover it exactly once.
    """
    if stored.atom.slot == EXTRA and stored.atom.nbytes <= SMALL_BYTES:
        source.check_cover(stored)
        values[key] = _value_of(source, stored)
    else:
        source.add(stored)


def _value_of(source: Source, stored: SourceTensor) -> dict[str, Any]:
    """Return the value of a stored tensor as JSON."""
    data = read_flat(source, stored, 0, stored.atom.elements).tobytes()
    return tensor_json(stored.atom.dtype, stored.atom.shape, data)


def parsed_object(text: str | None, what: str, path: str) -> dict[str, Any]:
    """Parse ``text``, the entry ``what`` of ``path``, as a JSON object; None gives an empty one. Raises ``Damaged``."""
    try:
        found = json.loads("{}" if text is None else text)
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}, not an object")
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(what, path, error) from error


def parsed_progress(text: str | None, what: str, path: str) -> dict[str, Any]:
    """Parse progress as ``parsed_object`` does, and check the entries that all formats share (see ``Source``)."""
    progress = parsed_object(text, what, path)
    try:
        check_progress(progress)
        if "random" in progress:
            check_random(decode(progress["random"]))
    except Exception as error:  # any kind: the file may hold anything
        raise _damaged(what, path, error) from error
    return progress


def check_progress(progress: dict[str, Any]) -> None:
    """Raise an error of any kind if an entry with the same meaning in all formats has the wrong form."""
    decode(progress, strict=False)
    step, groups = progress.get("step"), groups_of(progress)
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"{step!r} is no step")
    for name in ("values", "extra", "things"):
        _need(name, progress.get(name, {}), dict)
    _need("a group", [group for group, _ in groups], list, dict)
    _need("group_parameters", [names for _, names in groups], list, list)
    _need("a name of a parameter", [name for _, names in groups for name in names], list, str)
    aliases = progress.get("aliases", {})
    _need("aliases", aliases, dict)
    _need("a name of a tied tensor", [*aliases.values()], list, str)
    _need("optimizers", progress.get("optimizers", []), list, str)
    _need("values", [*progress.get("values", {}).values()], list, dict)


@contextmanager
def state_dict_of(path: str) -> Iterator[None]:
    """Turn errors that arise while ``path`` is read as a state dict into ``Damaged``, which names ``path``."""
    try:
        yield
    except HoldfastError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise Damaged(
            f"{path} does not read as a state dict ({type(error).__name__}: {error})", path=path
        ) from error


def _need(what: str, value: Any, kind: type, of: type | None = None) -> None:
    if not isinstance(value, kind) or (of is not None and not all(isinstance(each, of) for each in value)):
        raise ValueError(f"{what} is not of the form that it has")


def check_random(state: dict[str, Any]) -> None:
    """Raise the error that setting the generators to ``state`` would raise."""
    import torch

    version, words, gauss = state["python"]
    random.Random().setstate((version, tuple(int(word) for word in words), gauss))
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"])


def _damaged(what: str, path: str, error: Exception) -> Damaged:
    return Damaged(
        f"{path}: {what} does not read as what is written there ({type(error).__name__}: {error}). Take another copy of"
        " it, or remove that entry to read the tensors alone.",
        path=path,
    )
