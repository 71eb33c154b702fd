"""Keys: what the entries of a nested state dict are: of the model, of an optimizer, or something else.

An entry is known by its key, as ``torch.distributed.checkpoint`` forms it of the names on the way, and by these names,
where the writer kept them: ``optim.state.w.step``. An optimizer is where ``param_groups`` are. The model is where the
names of its parameters are, or what is called so, or what is not inside of anything.
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
from ..state.atoms import STEP, TORCH_NAMES, WRAPPED

MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict", "model_state", "net")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "masked_bias")
"""What names of buffers end with."""
EXTRA = "extra"
"""The slot of tensors that are neither of the model nor of its optimizer."""
KEY = "dcp"
"""Of an atom in an index its key in a state dict; of a commit's progress the ``paths`` and the ``values`` by key."""
PROGRESS = "holdfast.progress"
"""The key of a progress as JSON, where that has no keys of its own."""
MOST_OPTIMIZERS, MOST_NAMES = 64, 256
"""Optimizers of one state, and names on the way to a tensor: each key is compared with all of them."""
_GROUPS = re.compile(r"(?:^|\.)(?=param_groups(?:\.|$))")

Path = tuple[Any, ...]
"""The names on the way to an entry; numbers are places in lists."""


class Kind(NamedTuple):
    """Of a tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass
class Named:
    """``tensors`` has the name and the slot of each tensor, ``optimizers`` and ``model`` what their keys begin with."""

    tensors: dict[str, tuple[str, str]]
    model: str
    optimizers: list[str]
    numbers: dict[str, str] = field(default_factory=dict)
    """The names of parameters that an optimizer knows by number."""
    of_model: set[str] = field(default_factory=set)
    """What the tensors of the model are called."""
    is_wrapped: bool = False
    """Whether all keys of the model have the ``module.`` of a wrapper; if only some have it, it is the model's own."""

    def name_in_model(self, key: str) -> str:
        """Of the tensor ``key`` of the model."""
        name = key.removeprefix(self.model)
        return canonical(name) if self.is_wrapped else unwrapped(name)

    def plain(self, name: str) -> str:
        """Of the parameter that an optimizer knows as ``name``."""
        own = unwrapped(name)
        return own if own in self.of_model else canonical(name)

    @property
    def roots(self) -> dict[str, Any]:
        """For a person: where what was found."""
        return {"model": self.model.rstrip("."), "optimizer": [root.rstrip(".") for root in self.optimizers]}


def canonical(name: str) -> str:
    """``name`` without the wrappers on the way.

    >>> canonical("module._orig_mod.layers.0._checkpoint_wrapped_module.w")
    'layers.0.w'
    """
    return unwrapped(name).removeprefix("module.")


def unwrapped(name: str) -> str:
    """``name`` without what wrappers of torch are called, and nothing else is."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def name_all(
    tensors: Mapping[str, Kind], paths: Mapping[str, Path], values: Mapping[str, Any], where: str = "this"
) -> Named:
    """What ``tensors`` are, by key. ``paths`` are those of all entries, tensors or not, in the writer's order, where it
    kept them; else one name each, the key. ``values`` are those of entries that are no tensors: what of them says which
    numbers are in which group is needed to name parameters that an optimizer knows by number. Raises ``BadInput``,
    naming ``where`` they are, if several could be the model and nothing tells which is."""
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
    named = Named({}, model, optimizers)
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


def _likely(keys: list[str], tensors: Mapping[str, Kind]) -> list[str]:
    """Of ``keys`` those that tell where the model is. A number beside a model is none, nor is a generator's state,
    which is bytes in a row; but a model may have numbers alone."""
    shaped = [key for key in keys if tensors[key].shape]
    weights = [key for key in shaped if len(tensors[key].shape) > 1 or tensors[key].dtype != "U8"]
    numbers = [key for key in keys if not tensors[key].shape and slot_of(key, tensors[key]) == "param"]
    return weights or numbers or shaped or keys


def _set_seconds_apart(named: Named) -> None:
    """Of two that have one name the second is something else; an optimizer with such is none."""
    taken: set[tuple[str, str]] = set()
    seconds = {key for key, name in named.tensors.items() if name in taken or taken.add(name)}
    others = {root for root in named.optimizers if any(key.startswith(f"{root}state.") for key in seconds)}
    named.optimizers = [root for root in named.optimizers if root not in others]
    for key in named.tensors:
        if key in seconds or inside(key, list(others)):
            named.tensors[key] = key, EXTRA


def state_of(key: str, path: Path, optimizers: Sequence[str]) -> tuple[str, str] | None:
    """The parameter and the slot, if the entry is an optimizer's state."""
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
    """Of parameters, where hyper-parameters are by parameter."""
    found = set()
    for key, path in paths.items():
        for root in optimizers:
            if key.startswith(f"{root}param_groups.") and not in_list(path):
                found.add(key.removeprefix(f"{root}param_groups.").rpartition(".")[0])
    return found


def in_list(path: Path) -> bool:
    """Whether an entry of ``param_groups`` is in a list of groups."""
    return any(a == "param_groups" and isinstance(b, int) for a, b in pairwise(path))


def _model_root(rest: Iterable[str], paths: Mapping[str, Path], known: set[str], where: str) -> str:
    """What the keys of the model begin with."""
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
    """The root of what is called as models are, on the way to ``top``."""
    return _root_of(top[: max(i for i, name in enumerate(top) if name in MODEL_NAMES) + 1])


def _root_of(top: Path) -> str:
    return "".join(f"{name}." for name in top)


def _one_of(roots: list[str], where: str) -> str:
    """Of ``roots`` that could all be the model's, the one that is not inside of anything, or is called as models are;
    of several such the one with the fewest names, and then the one that is called by the first of ``MODEL_NAMES``."""
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
    """Whether an entry is in the dictionary ``root``, and not in one inside of that."""
    return len(path) == 1 or not key.removeprefix(root).removesuffix(str(path[-1]))


def slot_of(name: str, kind: Kind) -> str:
    """Of a tensor of the model that no optimizer knows: a parameter, or a buffer by its type or name."""
    number = TORCH_NAMES[kind.dtype].startswith(("float", "bfloat", "complex"))
    return "param" if number and name.rpartition(".")[2] not in BUFFERS else "buffer"


def _groups_in(paths: Mapping[str, Path], values: Mapping[str, Any]) -> list[list[Any]]:
    """Of the parameter groups of all optimizers, in order, what they call their parameters."""
    return [
        values[key] for key, way in paths.items() if in_list(way) and way[-1] == "params" and key in values
    ]


def _numbered(
    states: Mapping[str, tuple[str, str]],
    model: list[tuple[str, Kind]],
    tensors: Mapping[str, Kind],
    groups: Sequence[Sequence[Any]],
) -> dict[str, str]:
    """The names of parameters that the optimizer knows by number: the model's tensors in order, if they are as many and
    of the shapes of what the optimizer has for them. Each group is taken to have its own in that order, which shapes
    cannot show where neighbours of one group have the same; if the next of two groups could be the next of the model,
    or none can, nothing is named."""
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for key, (name, slot) in states.items():
        shape = tensors[key].shape
        says = "." not in slot and slot != STEP  # what is in a list does not
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
    """By the shapes of what is held for the next number of a group, those groups."""
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
    """Whether an optimizer may hold tensors of these shapes for a parameter of ``shape``: all of that, or with ones in
    it, as factors of it have; numbers alone are of a number. In a group ``alone``, which is in order, what else it
    holds says nothing against it."""
    held = (held - {()}) or held  # a number beside tensors may be of any parameter
    if not held or (alone and (shape in held or held == {()})):
        return True
    factors = all(
        len(each) == len(shape) and all(a in (1, n) for a, n in zip(each, shape, strict=True))
        for each in held
    )
    return factors and tuple(map(max, zip(*held, strict=True))) == shape


def numbered_name(key: str, name: str) -> str:
    """A name for what an optimizer knows by a number that says nothing: all of its key but the slot."""
    return key.rpartition(".")[0] if name.isdecimal() else name
