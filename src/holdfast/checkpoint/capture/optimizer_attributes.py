"""An optimizer's own state: attributes, and keys of its ``state`` that are no parameters.

Log records hold what steps consume, and a replay calls the optimizer's own ``step``, which changes own state as
training did. So three things suffice:

1. A snapshot carries the own state.
2. A log record carries what the script changed between two steps.
3. What neither can carry is reported at the step that changes it.

A *leaf* is one value with the path to it, such as ``warmup.steps``. Fields of objects are traversed; a container of
plain values is one leaf.

Called by the training thread: ``begin`` once, ``accept`` after a resume, then ``changed`` before and ``stepped`` after
every step of the optimizer.
"""

from __future__ import annotations

import functools
import json
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from ...errors import BadInput
from ...optim.kinds import is_elementwise
from ...state.encoding import decode, encode
from ...state.live_state import LiveState
from ...state.plain_tensors import TO_NAME
from ...state.tensor_entries import CARRIED
from .mutation_check import GENERATORS, generator_state, mark_of

OF_TORCH = {
    "defaults", "state", "param_groups", "step", "grad_scale", "found_inf", "_opt_called", "_step_supports_amp_scaling",
    "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
}  # fmt: skip
"""Attributes of every torch optimizer, including those that schedulers and scalers add."""
MOST_GIVEN = 1 << 20
"""The most characters of leaves, as JSON, that are kept as the optimizer was made."""
DEPTH = 8
"""The most objects and containers on the path to a leaf."""
_HOSTS = {
    "accelerate", "asyncio", "concurrent", "deepspeed", "holdfast", "lightning", "lightning_fabric", "logging",
    "multiprocessing", "pytorch_lightning", "threading", "tqdm", "transformers", "wandb",
}  # fmt: skip
"""Packages whose objects belong to the program around the optimizer."""
_CODE = (
    type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial,
    weakref.ReferenceType, nn.Module, property,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, deque)
Path = tuple[tuple[str, Any], ...]
"""The path to a leaf: attributes and items, each with its name or key.

``state`` is an item of an optimizer's state.
"""
Leaves = list[list[Any]]
"""Leaves as JSON: the path and the value of each; no value for a leaf that was removed."""


class OptimizerAttributes:
    """The own state of ``optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.watched = not is_elementwise(optimizer)
        """False for torch's elementwise classes, which keep no own state."""
        self._objects: set[Path] = set()
        self._given: dict[Path, Any] = {}
        self._digests: dict[Path, str] = {}
        self._given_marks: dict[Path, Any] = {}
        self._forgot = False
        """True if the leaves that the optimizer was made with are not known any more."""
        self._marks: dict[Path, Any] = {}
        self._values: dict[Path, Any] = {}
        """The leaves of the last scan."""
        self._opaque: set[Path] = set()
        """Leaves that hold anything besides numbers, texts, tensors and plain containers of these."""
        self._begun = self._was_trained = False
        self.lost: str | None = None
        """The name of a leaf that the last step changed and that nothing can carry."""

    def begin(self, state: LiveState) -> None:
        """Record the leaves that the optimizer was made with. A second call does nothing."""
        if self._begun or not self.watched:
            return
        self._begun, self._was_trained = (
            True,
            any(isinstance(key, torch.Tensor) for key in self._optimizer.state),
        )
        leaves = dict(self._leaves(self._objects.add))
        self._given_marks = {path: mark_of(value) for path, value in leaves.items()}
        for path, value in leaves.items():
            encoded = self._encoded(state, value)
            if encoded is not None:
                self._given[path], self._digests[path] = encoded, _digest(encoded)

    def accept(self) -> None:
        """Accept the current leaves as the start of the run.

        Leaves that the optimizer was made with are kept for a rollback, unless they are large.
        """
        self._forgot = self._forgot or len(json.dumps(list(self._given.values()))) > MOST_GIVEN
        if self._forgot:
            self._given, self._given_marks = {}, {}
        self._marks = self._now()

    def _now(self) -> dict[Path, Any]:
        """Return the mark of each leaf, and note the leaves that cannot be compared fully (``_opaque``)."""
        found: dict[Path, Any] = {}
        self._opaque.clear()
        self._values = dict(self._leaves()) if self.watched else {}
        for path, value in self._values.items():
            opaque: list[Any] = []
            found[path] = mark_of(value, opaque)
            if opaque:
                self._opaque.add(path)
        return found

    @property
    def has_leaves(self) -> bool:
        """Return whether the optimizer has any own state."""
        return bool(self._now())

    @property
    def can_restore(self) -> bool:
        """Return whether ``restore`` can be called after ``accept``: all that steps change can be carried."""
        return not self.watched or (self.lost is None and not (self._forgot and self.has_leaves))

    @property
    def has_changed(self) -> bool:
        """Return whether any leaf differs from what the last step left."""
        return self._now() != self._marks

    def changed(self, state: LiveState) -> Leaves | None:
        """Return the leaves changed since the last step, as JSON; None if there are none.

        Leaves that cannot be stored are left out.
        """
        if not self.watched:
            return None
        now = self._now()
        leaves, self._values = self._values, {}
        if now == self._marks:
            return None
        other = [path for path, mark in now.items() if self._marks.get(path, self) != mark]
        other = [path for path in other if self._is_known(path, leaves[path])]
        encoded = [[self._path_json(state, path), found] for path in other
                if (found := self._encoded(state, leaves[path])) is not None]  # fmt: skip
        encoded += [[self._path_json(state, path)] for path in self._marks if path not in now]
        return encoded or None

    def stepped(self, state: LiveState) -> None:
        """Note what the step has changed, and whether that can be carried."""
        if not self.watched:
            return
        before, self._marks = self._marks, self._now()
        for path, value in self._values.items() if before != self._marks else ():
            if before.get(path, self) != self._marks[path] and not self._is_known(path, value):
                self.lost = self.lost or path_text(path)
        self._values = {}

    def _is_known(self, path: Path, value: Any) -> bool:
        """Return whether a leaf can be stored and restored in a newly made optimizer."""
        if isinstance(value, GENERATORS):
            return path in self._digests
        if any(path[:depth] not in self._objects for depth in range(1, len(path))):
            return False
        return path not in self._opaque or can_be_stored(value)

    # In snapshots

    def carried(self, state: LiveState) -> Leaves:
        """Return as JSON all leaves that differ from those of a newly made optimizer."""
        found = []
        for path, value in self._leaves() if self.watched else ():
            encoded = self._encoded(state, value)
            if encoded is None or not self._is_known(path, value):
                continue
            always = self._was_trained or path[0][0] == "state" or _refers(encoded)
            if always or self._digests.get(path) != _digest(encoded):
                found.append([self._path_json(state, path), encoded])
        return found

    def restore(self, state: LiveState, carried: Leaves) -> None:
        """Restore what ``carried`` returned; every other leaf becomes as the optimizer was made."""
        if not self.watched:
            return
        for path, mark in self._now().items():
            if path not in self._given_marks:
                self._remove(path)
            elif mark != self._given_marks[path] and path in self._given:
                self._put(state, path, self._given[path])
        self.apply(state, carried)

    def apply(self, state: LiveState, told: Leaves) -> None:
        """Set the leaves to the values in ``told``."""
        for way, *value in told:
            path = tuple((kind, decode(key, lambda each: self._resolved(state, each))) for kind, key in way)
            if value:
                self._put(state, path, value[0])
            else:
                self._remove(path)

    def _put(self, state: LiveState, path: Path, told: Any) -> None:
        (kind, key), holder = path[-1], self._at(path[:-1])
        if holder is None:  # the script now makes another optimizer
            return
        value = decode(told, lambda each: self._resolved(state, each))
        there = _item(holder, kind, key)
        if isinstance(there, GENERATORS):
            _set_generator(there, value)
        elif _is_alike(there, value):
            with torch.no_grad():
                there.detach().copy_(value)
        elif kind == "attr":
            object.__setattr__(holder, key, value)
        else:
            (holder.state if kind == "state" else holder)[key] = value

    def _remove(self, path: Path) -> None:
        (kind, key), holder = path[-1], self._at(path[:-1])
        if kind == "attr":
            if hasattr(holder, key):
                object.__delattr__(holder, key)
        elif kind == "state":
            holder.state.pop(key, None)
        elif isinstance(holder, dict):
            holder.pop(key, None)

    def _at(self, path: Path) -> Any:
        found: Any = self._optimizer
        for kind, key in path:
            found = None if found is None else _item(found, kind, key)
        return found

    # As JSON

    def _encoded(self, state: LiveState, value: Any) -> Any:
        """Return a leaf as JSON, with parameters and tensors of the optimizer's state by name; None if that is
        impossible.
        """
        if isinstance(value, GENERATORS):
            state_of = value.get_state() if isinstance(value, torch.Generator) else generator_state(value)
            return encode(state_of)
        if not can_be_stored(value):
            return None
        held = {}

        def known(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return None
            if id(each) in state.name_of:
                return {"__parameter__": state.name_of[id(each)]}
            if not held:
                held.update(_places(state, self._optimizer))
            return held.get(id(each))

        return encode(value, type(self._optimizer).__name__, known)

    def _resolved(self, state: LiveState, told: dict[str, Any]) -> Any:
        if "__parameter__" in told:
            return state.parameter(told["__parameter__"]).parameter
        if "__slot__" in told:
            name, slot = told["__slot__"]
            return self._optimizer.state[state.parameter(name).parameter][slot]
        if "__group__" in told:
            number, key = told["__group__"]
            return self._optimizer.param_groups[number][key]
        return None

    def _path_json(self, state: LiveState, path: Path) -> list[Any]:
        return [[kind, self._encoded(state, key)] for kind, key in path]

    # Traversal

    def _leaves(self, seen_object: Callable[[Path], None] = lambda path: None) -> Iterator[tuple[Path, Any]]:
        yield from _fields(
            self._optimizer, (), {id(self._optimizer), *map(id, self._optimizer.param_groups)}, seen_object
        )


def _fields(
    holder: Any, path: Path, seen: set[int], seen_object: Callable[[Path], None]
) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves in the fields of an object."""
    is_optimizer = isinstance(holder, torch.optim.Optimizer)
    if is_optimizer and path:  # a nested optimizer, such as that of a schedule inside the outer one
        for number, group in enumerate(holder.param_groups):
            inside = (*path, ("attr", "param_groups"), ("item", number))
            own = {} if id(group) in seen else group
            yield from (((*inside, ("item", key)), value) for key, value in own.items() if key != "params")
    for name, value in _attributes(holder):
        is_mode = name in ("train", "eval") and callable(value)  # watched by the tap
        if not (is_optimizer and (name in OF_TORCH or is_mode)):
            yield from _leaves_in(value, (*path, ("attr", name)), seen, seen_object)
    if is_optimizer and len(path) == 0:
        for key in [key for key in holder.state if not isinstance(key, torch.Tensor)]:
            yield from _leaves_in(holder.state[key], (("state", key),), seen, seen_object)


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    found = list(getattr(holder, "__dict__", {}).items())
    slots = [
        name
        for kind in type(holder).__mro__
        for name in kind.__dict__.get("__slots__", ())
        if kind is not object
    ]
    return found + [
        (name, getattr(holder, name)) for name in slots if name != "__dict__" and hasattr(holder, name)
    ]


def _leaves_in(
    value: Any, path: Path, seen: set[int], seen_object: Callable[[Path], None]
) -> Iterator[tuple[Path, Any]]:
    if len(path) < DEPTH and _is_object(value):
        if id(value) not in seen:
            seen_object(path)
            if isinstance(value, torch.optim.Optimizer):
                seen_object((*path, ("attr", "param_groups")))
                for number in range(len(value.param_groups)):
                    seen_object((*path, ("attr", "param_groups"), ("item", number)))
            yield from _fields(value, path, seen | {id(value)}, seen_object)
    elif len(path) < DEPTH and isinstance(value, _CONTAINERS) and _has_objects(value):
        if id(value) not in seen:
            seen_object(path)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                yield from _leaves_in(item, (*path, ("item", key)), seen | {id(value)}, seen_object)
    else:
        yield path, value


def _is_object(value: Any) -> bool:
    """Return whether ``value`` is an object whose fields are traversed."""
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(
        value, (torch.Tensor, np.ndarray, np.generic, *GENERATORS)
    ):
        return False
    if (
        isinstance(value, _CODE)
        or kind.__module__.partition(".")[0] in _HOSTS
        or isinstance(value, _CONTAINERS)
    ):
        return False
    if isinstance(value, (str, int, float, complex, bytes, set, frozenset)):
        return False
    return hasattr(value, "__dict__") or hasattr(kind, "__slots__")


def _has_objects(value: Any) -> bool:
    """Return whether a container holds an object or a generator, at any depth."""
    items = value.values() if isinstance(value, dict) else value
    kinds = set(map(type, items))
    if kinds <= _PLAIN_KINDS:
        return False
    return any(
        isinstance(item, GENERATORS)
        or _is_object(item)
        or (isinstance(item, _CONTAINERS) and _has_objects(item))
        for item in items
    )


_PLAIN_KINDS = {bool, int, float, str, bytes, type(None), torch.Tensor, nn.Parameter}
"""Types whose values hold no other values."""


def can_be_stored(value: Any) -> bool:
    """Return whether ``value`` would be restored unchanged."""
    try:
        refuse_unstorable(value, "")
    except BadInput:
        return False
    return True


def refuse_unstorable(value: Any, where: str) -> None:
    """Raise ``BadInput``, naming ``where``, for a value that would not be restored unchanged. Copies no tensor."""
    encode(value, where, _tensor_by_kind)


def _tensor_by_kind(value: Any) -> Any:
    """Return a stand-in for a plain tensor, so that its bytes are not read; None for anything else."""
    plain = (
        type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta
    )
    return {} if plain and value.dtype in TO_NAME else None


def _refers(told: Any) -> bool:
    """Return whether a leaf as JSON refers to a tensor of the optimizer's state or groups."""
    if isinstance(told, list):
        return any(map(_refers, told))
    if not isinstance(told, dict):
        return False
    return "__slot__" in told or "__group__" in told or any(map(_refers, told.values()))


def _places(state: LiveState, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return by ``id`` where the optimizer holds its tensors: in its groups, or in the state of a parameter."""
    found: dict[int, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        found |= {id(value): {"__group__": [number, key]} for key, value in tensors.items()}
    for parameter, slots in optimizer.state.items():
        name = state.name_of.get(id(parameter))
        if name is not None and isinstance(slots, Mapping):
            tensors = {slot: value for slot, value in slots.items() if isinstance(value, torch.Tensor)}
            found |= {id(value): {"__slot__": [name, slot]} for slot, value in tensors.items()}
    return found


def _digest(told: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(told).encode())


def _item(holder: Any, kind: str, key: Any) -> Any:
    if kind == "attr":
        return getattr(holder, key, None)
    if kind == "state":
        return holder.state.get(key)
    try:
        return holder[key]
    except (KeyError, IndexError):
        return None


def _is_alike(there: Any, value: Any) -> bool:
    """Return whether the elements of ``value`` can be copied into the tensor ``there``, which others may hold, too."""
    both = type(there) is torch.Tensor and type(value) is torch.Tensor and there is not value
    return both and (there.shape, there.dtype, there.stride()) == (value.shape, value.dtype, value.stride())


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def path_text(path: Path) -> str:
    """Return the name of a leaf as a person writes it.

    >>> path_text((("attr", "warmup"), ("item", 0), ("attr", "steps")))
    'warmup[0].steps'
    """
    text = ""
    for kind, key in path:
        shown = f"parameter of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
        text += f".{key}" if kind == "attr" else f".state[{shown}]" if kind == "state" else f"[{shown}]"
    return text.removeprefix(".")


# State of parameters

RESERVED = ("param", "buffer", *CARRIED)
"""Names that state of a parameter may not have."""


class StateCheck:
    """A check that refuses state of parameters that commits cannot hold, in the step in which it first appears.

    Every step checks only the kinds of state: names, types, layouts. Values are inspected only where a kind is new, or
    is a container.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._known = optimizer, set[Any]()
        self._every_step = not is_elementwise(optimizer)
        self._looked = False

    def look(self, state: LiveState) -> None:
        """Check the state. Raises ``BadInput`` or a subclass.

        Called after each step, and again once ``state`` includes parameters that were added to the model.
        """
        if self._looked and not self._every_step:
            return
        optimizer, kind = self._optimizer, type(self._optimizer).__name__
        if not self._looked and not optimizer.state and optimizer.state_dict().get("state"):
            raise BadInput(
                f"{kind} keeps its state elsewhere than in {kind}.state, which is empty after a step, so commits could"
                " not hold it. Give the optimizer inside of it whose step() updates parameters."
            )
        held = [(key, slots) for key, slots in optimizer.state.items() if isinstance(key, torch.Tensor)]
        kinds, containers = self._kinds(held)
        if not kinds <= self._known:
            self._refuse(state, held)
            if not all(id(key) in state.name_of for key, _ in held):
                return
            self._known |= kinds
        self._looked = True
        for key, slot, value in containers:
            refuse_unstorable(value, f"{kind}.state[{state.name_of[id(key)]}][{slot!r}]")

    @staticmethod
    def _kinds(held: list[tuple[torch.Tensor, Any]]) -> tuple[set[Any], list[tuple[torch.Tensor, str, Any]]]:
        kinds: set[Any] = set()
        values: list[Any] = []
        for key, slots in held:
            kinds.add(id(key))
            if type(slots) is dict:
                kinds.update(slots)
                values += slots.values()
            else:
                kinds.add(type(slots))
        types = set(map(type, values))
        kinds |= types
        kinds |= {(value.dtype, value.layout) for value in values if isinstance(value, torch.Tensor)}
        if types <= _PLAIN_KINDS:
            return kinds, []
        return kinds, [
            (key, slot, value)
            for key, slots in held
            if type(slots) is dict
            for slot, value in slots.items()
            if not (type(value) in _PLAIN_KINDS or isinstance(value, torch.Tensor) or _is_plain(value))
        ]

    def _refuse(self, state: LiveState, held: list[tuple[torch.Tensor, Any]]) -> None:
        kind = type(self._optimizer).__name__
        members = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for key, slots in held:
            if id(key) not in state.name_of and id(key) not in members:
                raise BadInput(
                    f"{kind} keeps state of a tensor of shape {tuple(key.shape)} that is no parameter of the model, so"
                    " commits could not hold it. Keep it in the state of a parameter, or in an attribute."
                )
            if not isinstance(slots, dict):
                name = state.name_of.get(id(key), f"parameter of shape {tuple(key.shape)}")
                raise BadInput(
                    f"{kind}.state[{name}] is a {type(slots).__name__}, and commits hold dictionaries"
                    " of what belongs to a parameter: keep it under a name there."
                )
        names = {
            (name, isinstance(value, torch.Tensor)) for _, slots in held for name, value in slots.items()
        }
        taken = [
            name for name, is_tensor in names if (is_tensor if not isinstance(name, str) else _is_taken(name))
        ]
        if taken:
            raise BadInput(
                f"{kind} keeps state under the name {taken[0]!r}, which commits need for themselves:"
                " keep it under another"
            )
        for parameter in state.parameters:
            state.owned(parameter)


def _is_taken(name: str) -> bool:
    return name in RESERVED or "/" in name


def _is_plain(value: Any) -> bool:
    """Return whether a list, tuple or queue holds only numbers, texts and tensors that can be stored."""
    if type(value) not in (list, tuple, deque) or not set(map(type, value)) <= _PLAIN_KINDS:
        return False
    return all(_tensor_by_kind(item) is not None for item in value if isinstance(item, torch.Tensor))
