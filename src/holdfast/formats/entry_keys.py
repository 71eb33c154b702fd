"""The roles of the entries of a nested state dict: model, optimizer, or something else.

An entry is identified by its key, as ``torch.distributed.checkpoint`` forms it from the names on the path
(``optim.state.w.step``), and by these names, where the writer kept them. An optimizer is where ``param_groups`` are.
The model is where the names of the optimizer's parameters are; else where a name says so (``MODEL_NAMES``); else at the
top level.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import BadInput
from ..state.tensor_entries import STEP, TORCH_NAMES, WRAPPED

MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict", "model_state", "net")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "masked_bias")
"""The last components of the names of buffers."""
EXTRA = "extra"
"""The slot of tensors that belong neither to the model nor to its optimizer."""
KEY = "dcp"
"""A JSON key with two uses.

In an index it holds a tensor entry's key in a state dict; in a commit's progress it holds ``paths`` and ``values`` by
key.
"""
PROGRESS = "holdfast.progress"
"""The key of the progress as JSON, in formats without keys for progress."""
MOST_OPTIMIZERS, MOST_NAMES = 64, 256
"""Limits for the optimizers of one state and the names on the path to a tensor: each key is compared with all of them.
"""
_TABLE = re.compile(r"(qmap|absmax|max|new_max)\d|(unorm|gnorm)_vec")
"""Slots of bitsandbytes that have tables and scales for other slots of a parameter."""
_GROUPS = re.compile(r"(?:^|\.)(?=param_groups(?:\.|$))")
Path = tuple[Any, ...]
"""The names on the path to an entry; numbers are positions in lists."""


class ShapeAndType(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass
class TensorRoles:
    """The role of each tensor of a state dict.

    ``tensors`` holds the name and slot of each tensor; ``optimizers`` and ``model`` hold the prefixes of their keys.
    """

    tensors: dict[str, tuple[str, str]]
    model: str
    optimizers: list[str]
    numbers: dict[str, str] = field(default_factory=dict)
    """The names of parameters that an optimizer identifies by number."""
    of_model: set[str] = field(default_factory=set)
    """The names of the model's tensors."""
    is_wrapped: bool = False
    """True if all keys of the model have a wrapper's ``module.``.

    If only some have it, it belongs to the model's names.
    """

    def name_in_model(self, key: str) -> str:
        """Return the model's name of the tensor ``key``."""
        name = key.removeprefix(self.model)
        return canonical(name) if self.is_wrapped else unwrapped(name)

    def plain(self, name: str) -> str:
        """Return the model's name of the parameter that an optimizer calls ``name``."""
        own = unwrapped(name)
        return own if own in self.of_model else canonical(name)

    @property
    def roots(self) -> dict[str, Any]:
        """The keys at which the model and the optimizers were found, for messages."""
        return {"model": self.model.rstrip("."), "optimizer": [root.rstrip(".") for root in self.optimizers]}


def canonical(name: str) -> str:
    """Return ``name`` without the components that wrappers added.

    >>> canonical("module._orig_mod.layers.0._checkpoint_wrapped_module.w")
    'layers.0.w'
    """
    return unwrapped(name).removeprefix("module.")


def with_lists(value: Any) -> Any:
    """Convert dictionaries whose keys are the positions of a list to lists, at every level."""
    if not isinstance(value, dict) or not value:
        return value
    made = {key: with_lists(item) for key, item in value.items()}
    places = [str(place) for place in range(len(made))]
    return [made[place] for place in places] if made.keys() == set(places) else made


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Rebuild flattened dictionaries and lists: the names on the path are joined by dots."""
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *way, last = key.split(".")
        table = made
        for part in way:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                return dict(flat)  # the key has a dot of its own
        if last in table:
            return dict(flat)
        table[last] = value
    return {key: with_lists(value) for key, value in made.items()}


def unwrapped(name: str) -> str:
    """Return ``name`` without the components that are used by torch's wrappers alone."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def name_all(
    tensors: Mapping[str, ShapeAndType],
    paths: Mapping[str, Path],
    values: Mapping[str, Any],
    where: str = "this",
) -> TensorRoles:
    """Assign every tensor to the model, an optimizer, or neither.

    Raises ``BadInput`` if several models are possible.

    Args:
        tensors: Shape and dtype by key.
        paths: The paths of all entries, tensors or not, in the writer's order; a path is the key alone where the writer
            kept none.
        values: The entries that are no tensors. Those of parameter groups name parameters that an optimizer knows by
            number.
        where: The name of the state dict, for messages.
    """
    optimizers = sorted({key[: found.end()] for key in paths for found in [_GROUPS.search(key)] if found})
    if len(optimizers) > MOST_OPTIMIZERS:
        raise BadInput(
            f"{where} has param_groups in {len(optimizers)} places, which is no state of a training"
        )
    if (longest := max((key.count(".") for key in tensors), default=0)) > MOST_NAMES:
        raise BadInput(f"{where} has a tensor whose name has {longest} dots, which no model has")
    states = {key: found for key in tensors if (found := state_of(key, paths[key], optimizers)) is not None}
    rest = [key for key in paths if key in tensors and key not in states and not inside(key, optimizers)]
    by_optimizer = {name for name, _ in states.values() if not name.isdecimal()}
    by_optimizer |= _names_in_groups(paths, optimizers)
    forms = {each(name) for name in by_optimizer for each in (canonical, unwrapped)}
    model = _model_root(_likely(rest, tensors), paths, forms, where)
    below = [key for key in rest if key.startswith(model)]
    in_model = [key for key in below if _is_direct(key, paths[key], model)] or below
    named = TensorRoles({}, model, optimizers)
    named.is_wrapped = all(unwrapped(key.removeprefix(model)).startswith("module.") for key in in_model)
    plain = {key: named.name_in_model(key) for key in in_model}
    named.of_model = set(plain.values())
    known = {named.plain(name) for name in by_optimizer}
    named.numbers = _numbered(
        states, [(plain[key], tensors[key]) for key in in_model], tensors, _groups_in(paths, values)
    )
    known |= set(named.numbers.values())
    for key, kind in tensors.items():
        if key in states:
            name, slot = states[key]
            name = named.numbers.get(name, numbered_name(key, name))
            named.tensors[key] = (named.plain(name), slot)
        elif key in plain:
            named.tensors[key] = (plain[key], "param" if plain[key] in known else slot_of(plain[key], kind))
        else:
            named.tensors[key] = (key, EXTRA)
    _set_seconds_apart(named)
    return named


def _likely(keys: list[str], tensors: Mapping[str, ShapeAndType]) -> list[str]:
    """Return those of ``keys`` that show where the model is.

    Single numbers and generator states (one axis of bytes) do not count, unless the model has nothing else.
    """
    shaped = [key for key in keys if tensors[key].shape]
    weights = [key for key in shaped if len(tensors[key].shape) > 1 or tensors[key].dtype != "U8"]
    numbers = [key for key in keys if not tensors[key].shape and slot_of(key, tensors[key]) == "param"]
    return weights or numbers or shaped or keys


def _set_seconds_apart(named: TensorRoles) -> None:
    """Move the second of two tensors with one name to ``EXTRA``; an optimizer that has such a tensor is none."""
    taken: set[tuple[str, str]] = set()
    seconds = {key for key, name in named.tensors.items() if name in taken or taken.add(name)}
    others = {root for root in named.optimizers if any(key.startswith(f"{root}state.") for key in seconds)}
    named.optimizers = [root for root in named.optimizers if root not in others]
    for key in named.tensors:
        if key in seconds or inside(key, list(others)):
            named.tensors[key] = key, EXTRA


def state_of(key: str, path: Path, optimizers: Sequence[str]) -> tuple[str, str] | None:
    """Return the parameter and the slot of an entry that is optimizer state; None for other entries."""
    for root in optimizers:
        if not key.startswith(f"{root}state."):
            continue
        depth = next((i for i in range(len(path)) if _joined(path[: i + 1]) == f"{root}state"), None)
        if depth is not None:
            way = path[depth + 1 :]
            return (str(way[0]), _joined(way[1:])) if len(way) > 1 else None
        name, _, slot = key.removeprefix(f"{root}state.").rpartition(".")
        return (name, slot) if name else None
    return None


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def inside(key: str, optimizers: Sequence[str]) -> bool:
    return any(f"{key}.".startswith((f"{root}state.", f"{root}param_groups")) for root in optimizers)


def _names_in_groups(paths: Mapping[str, Path], optimizers: Sequence[str]) -> set[str]:
    """Return the names of parameters, where the file keeps hyper-parameters by parameter."""
    found = set()
    for key, path in paths.items():
        for root in optimizers:
            if key.startswith(f"{root}param_groups.") and not in_list(path):
                found.add(key.removeprefix(f"{root}param_groups.").rpartition(".")[0])
    return found


def in_list(path: Path) -> bool:
    """Return whether an entry of ``param_groups`` is in a list of groups."""
    return any(a == "param_groups" and isinstance(b, int) for a, b in pairwise(path))


def _model_root(rest: Iterable[str], paths: Mapping[str, Path], known: set[str], where: str) -> str:
    """Return the prefix of the model's keys."""
    keys = list(rest)
    nested = any(len(path) > 1 for path in paths.values())  # else dictionaries are not known
    hits: Counter[str] = Counter()
    for key in keys:
        parts, path = key.split("."), paths[key]
        ends = {_joined(path[:i]).count(".") + 1 for i in range(1, len(path))} | {0}
        for i in range(len(parts)):
            if (i in ends or not nested) and canonical(".".join(parts[i:])) in known:
                hits["".join(f"{part}." for part in parts[:i])] += 1
                break
    if hits:
        most = max(hits.values())
        return _one_of([root for root, count in hits.items() if count == most], where)
    tops = [paths[key][:-1] for key in keys]
    if found := list(dict.fromkeys(_called(top) for top in tops if set(top) & set(MODEL_NAMES))):
        return _one_of(found, where)
    if not tops or () in tops:
        return ""
    names: dict[Path, list[str]] = {}
    for key in keys:
        names.setdefault(paths[key][:-1], []).append(str(paths[key][-1]))
    most = max(names, key=lambda top: len(names[top]))
    return _one_of([_root_of(top) for top in names if sorted(names[top]) == sorted(names[most])], where)


def _called(top: Path) -> str:
    """Return the prefix of the innermost entry on ``top`` that has one of ``MODEL_NAMES``."""
    return _root_of(top[: max(i for i, name in enumerate(top) if name in MODEL_NAMES) + 1])


def _root_of(top: Path) -> str:
    return "".join(f"{name}." for name in top)


def _one_of(roots: list[str], where: str) -> str:
    """Choose the model's prefix from ``roots``, which are all possible.

    Prefers the top level, then a name of ``MODEL_NAMES``: the shallowest, then the first in that list. Raises
    ``BadInput`` if that leaves several or none.
    """
    if len(roots) == 1:
        return roots[0]
    if "" in roots:
        return ""
    called = {root: name for root in roots if (name := root.rstrip(".").split(".")[-1]) in MODEL_NAMES}
    ranks = {root: (root.count("."), MODEL_NAMES.index(name)) for root, name in called.items()}
    first = [root for root, rank in ranks.items() if rank == min(ranks.values())]
    if len(first) != 1:
        candidates = ", ".join(root.rstrip(".") for root in first or roots)
        raise BadInput(
            f"{where} holds several that could be the model: {candidates}. Save it with the one that you mean as"
            " 'model', or with that one alone."
        )
    return first[0]


def _is_direct(key: str, path: Path, root: str) -> bool:
    """Return whether an entry is directly in the dictionary ``root``, not in one nested in ``root``."""
    return len(path) == 1 or not key.removeprefix(root).removesuffix(str(path[-1]))


def slot_of(name: str, kind: ShapeAndType) -> str:
    """Return whether a tensor that no optimizer knows is a parameter or a buffer, judged by its dtype and name."""
    number = TORCH_NAMES[kind.dtype].startswith(("float", "bfloat", "complex"))
    return "param" if number and name.rpartition(".")[2] not in BUFFERS else "buffer"


def _groups_in(paths: Mapping[str, Path], values: Mapping[str, Any]) -> list[list[Any]]:
    """Return, for each parameter group of all optimizers in order, its identifiers of parameters."""
    return [
        values[key] for key, way in paths.items() if in_list(way) and way[-1] == "params" and key in values
    ]


def _numbered(
    states: Mapping[str, tuple[str, str]],
    model: list[tuple[str, ShapeAndType]],
    tensors: Mapping[str, ShapeAndType],
    groups: Sequence[Sequence[Any]],
) -> dict[str, str]:
    """Return the names of parameters that optimizers know by number, or nothing where they are ambiguous.

    Numbers are matched to the model's trained tensors in order: their count and the shapes of the optimizer's tensors
    must fit. Each group is assumed to keep the model's order; shapes cannot prove that for neighbours of equal shape in
    one group. If the next parameter of two groups, or of none, could be the model's next, nothing is named.
    """
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for key, (name, slot) in states.items():
        shape = tensors[key].shape
        # tensors in lists and tables do not tell the shape
        says = "." not in slot and slot != STEP and not _TABLE.fullmatch(slot)
        if name.isdecimal() and says:
            shapes.setdefault(int(name), set()).add(shape)
    trained = [(name, kind) for name, kind in model if slot_of(name, kind) == "param"]
    numbers = [number for group in groups for number in group]
    if any(isinstance(number, list | dict) for number in numbers):
        raise TypeError("a parameter of a group is neither a number nor a name")
    if not all(type(number) is int and 0 <= number < len(trained) for number in numbers):
        return {}
    left = [deque(group) for group in groups]
    if {n for group in left for n in group} != set(range(len(trained))) or sum(map(len, left)) != len(
        trained
    ):
        return {}
    heads: dict[frozenset[tuple[int, ...]], list[deque[int]]] = {}
    """Groups by the shapes of the state of their next number."""
    for group in filter(None, left):
        heads.setdefault(frozenset(shapes.get(group[0], set())), []).append(group)
    found = {}
    for name, kind in trained:
        fitting = [held for held in heads if _fits(kind.shape, held, len(left) == 1)]
        if len(fitting) != 1 or len(heads[fitting[0]]) != 1:
            return {}
        [group] = heads.pop(fitting[0])
        found[str(group.popleft())] = name
        if group:
            heads.setdefault(frozenset(shapes.get(group[0], set())), []).append(group)
    return found


def _fits(shape: tuple[int, ...], held: AbstractSet[tuple[int, ...]], alone: bool) -> bool:
    """Return whether optimizer tensors of the shapes ``held`` may belong to a parameter of ``shape``.

    They fit if they all have ``shape``, or ``shape`` with ones, as factors have; single numbers fit a single number. In
    a group ``alone``, whose order is known, other tensors beside a fitting one do no harm.
    """
    held = (held - {()}) or held  # a number beside tensors fits any parameter
    if not held or (alone and (shape in held or held == {()})):
        return True
    factors = all(
        len(each) == len(shape) and all(a in (1, n) for a, n in zip(each, shape, strict=True))
        for each in held
    )
    return factors and tuple(map(max, zip(*held, strict=True))) == shape


def numbered_name(key: str, name: str) -> str:
    """Return a name for state of a parameter known by a meaningless number: the key without the slot."""
    return key.rpartition(".")[0] if name.isdecimal() else name
