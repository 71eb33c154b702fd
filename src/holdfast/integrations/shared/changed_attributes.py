"""Attributes that training changes in objects of a script without a state of their own.

Trainers set things up in hooks that they do not call when training resumes in mid-epoch: a number of batches to
accumulate over, a weight of the loss, the layers that are frozen or in evaluation mode. Plain values in attributes are
stored by value. An attribute is stored only if training has changed it: everything else belongs to the script, also
after a resume. What cannot be stored causes a warning. Called by all integrations with trainers, as are the helpers for
wrapped optimizers.
"""

from __future__ import annotations

import copy
import json
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...checkpoint.capture.optimizer_attributes import HOSTS
from ...errors import BadInput
from ...quantities import shown
from ...state.capture import changes_of
from ...state.encoding import decode, encode
from ...state.generators import (
    GENERATORS,
    generator_from,
    generator_json,
    is_generator_json,
    is_set,
)
from ...state.layout.regions import local_held

SCALARS = (bool, int, float, str, type(None))
CONTAINERS = (list, dict, tuple, set, frozenset, deque, Counter, OrderedDict, defaultdict)
KINDS = frozenset((*SCALARS, *CONTAINERS, *GENERATORS, torch.Tensor, np.ndarray))
"""The exact types of values that are stored."""
PARTS = (nn.Module, torch.optim.Optimizer, torch.Tensor, types.ModuleType)
"""Types that are stored elsewhere, or are no state."""
OF_MODULES = frozenset({*vars(nn.Module()), "_output_capturing_hooks_installed"})
"""Attributes of modules that are no state. The last one is transformers' mark on a model whose hooks are there: in
another process they are not, and with the mark they would never be installed."""
CODE = (type, types.ModuleType, types.FunctionType)
"""Types with attributes that are no state of a dataset or collator."""
OF_DATA = ("dataset", "collator")
"""The names of what makes batches; those of objects inside begin with them."""
DEPTH = 3
"""The most containers and objects on the way to a tensor whose changes are noticed."""
SAVING = ("state_dict", "on_save_checkpoint", "state")
"""Methods by which a trainer saves an object of a script."""
MOST_ITEMS, MOST_CHARACTERS = 4096, 64 * 1024
"""Limits for the items of a list or dict, and for the JSON; longer attributes cause a warning and are not stored."""


class ChangedAttributes:
    """Plain attributes of ``objects``, by name, and which parameters of ``model`` require gradients.

    ``left_out`` lists attributes that are no state. Of ``drawing``, more objects by name, only random generators are
    watched. Created when the script has set everything up.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        model: nn.Module,
        left_out: Mapping[type, Collection[str]],
        drawing: Mapping[str, Any] | None = None,
    ) -> None:
        self._objects = {name: _Watched(name, thing, left_out) for name, thing in objects.items()}
        for name, thing in (drawing or {}).items():
            self._objects[name] = _Watched(name, thing, left_out, frozenset(GENERATORS))
        self._tensors = _TensorsAside(model)
        self._parameters = dict(model.named_parameters())
        self._told: set[str] = set()
        self._required = {name: p.requires_grad for name, p in self._parameters.items()}

    def changed(self) -> dict[str, Any]:
        """Return what has changed since creation: values by object and attribute, as JSON.

        Called once after each step. Warns of what has changed and cannot be stored.
        """
        for each in self._objects.values():
            each.warn_of(self._tensors)
        self._tensors.num_looks += 1
        values = self.values()
        required = {
            name: parameter.requires_grad
            for name, parameter in self._parameters.items()
            if parameter.requires_grad != self._required[name]
        }
        return {"values": values, "requires_grad": required}

    def values(self) -> dict[str, Any]:
        """Return the values that have changed since creation, by object and attribute, as JSON."""
        return {name: found for name, each in self._objects.items() if (found := each.changed())}

    def since(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return, for ``go_back``, what differs from the result ``before`` of an earlier call of ``values``."""
        return difference(before, self.values())

    def go_back(self, since: Mapping[str, Any]) -> None:
        """Set the attributes that ``since`` returned as they were: to earlier values, or as at creation."""
        for name, keys in since["made"].items():
            if name in self._objects:
                self._objects[name].reset(keys)
        self.restore(since)

    def begin_epoch(self, begin: Callable[[], Any], hook: str) -> Any:
        """Call the hooks ``hook`` by ``begin``, return its result, and warn of attributes that get other objects.

        Hooks are not called when training resumes in mid-epoch, and no run can store what is no plain value.
        """
        before = self._held()
        result = begin()
        now = self._held()
        names = {
            ".".join(place) for place, value in now.items() if before.get(place) is not value
        } - self._told
        self._told |= names
        if names:
            warnings.warn(
                f"{shown(sorted(names))} got other objects in {hook}, which is not called again when training goes on"
                " in mid-epoch, and no run can hold them. If training depends on them, make them where they are used,"
                " of a number that is kept as an attribute.",
                stacklevel=6,
            )
        return result

    def _held(self) -> dict[tuple[str, str], Any]:
        """Return the attributes that hold no plain value, by object and attribute."""
        return {(name, key): value for name, each in self._objects.items() for key, value in each.objects()}

    def restore(self, changed: Mapping[str, Any]) -> None:
        """Set the values that ``changed`` returned earlier. Objects that the script no longer has are skipped."""
        for name, values in changed["values"].items():
            if name in self._objects:
                self._objects[name].restore(values)
        set_required(self._parameters, changed.get("requires_grad", {}))


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for ``go_back``, the values of ``before`` that ``now`` has otherwise, and the names of new ones."""
    values = {
        name: {key: value for key, value in found.items() if now.get(name, {}).get(key, found) != value}
        for name, found in before.items()
    }
    made = {name: [key for key in found if key not in before.get(name, {})] for name, found in now.items()}
    return {"values": values, "made": made}


def set_up_again(
    progress: Mapping[str, Any],
    thing: str,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Repeat what hooks had done before the newest commit: which parameters are trained, and the groups of optimizers.

    Called before a run is resumed.

    Args:
        progress: The progress of the newest commit.
        thing: The name under which the script stores the result of ``changed``, as "attributes".
        parameters: The parameters by name.
        optimizers: The optimizers, which may get groups.
    """
    found = progress.get("things", {}).get(thing) or {}
    set_required(parameters, (decode(found).get("attributes") or {}).get("requires_grad", {}))
    members = progress.get("replay", {}).get("parameters", [])
    for optimizer, groups in zip(optimizers, members, strict=False):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for names in groups[len(optimizer.param_groups) :]:
            missing = [parameters[name] for name in names if name in parameters]
            if len(missing) == len(names) and not any(id(parameter) in held for parameter in missing):
                optimizer.add_param_group({"params": missing})


def set_required(parameters: Mapping[str, nn.Parameter], required: Mapping[str, bool]) -> None:
    """Set ``requires_grad`` of the ``parameters`` that ``required`` names."""
    for name, value in required.items():
        if name in parameters:
            parameters[name].requires_grad_(value)


def names_in(kind: type) -> frozenset[str]:
    """Return the names that methods of ``kind`` itself use.

    Attributes with these names belong to it, not to a subclass.
    """
    methods = [getattr(each, "__wrapped__", each) for each in vars(kind).values()]
    return frozenset(name for each in methods if hasattr(each, "__code__") for name in each.__code__.co_names)


def data_objects(loader: Any, watched: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the objects that make the batches of ``loader``, by name: datasets and collators, also those inside.

    Those that are ``watched`` already are left out, as the model whose method collates.
    """
    collate = getattr(loader, "collate_fn", None)
    collate = collate.__self__ if isinstance(collate, types.MethodType) else collate
    found: dict[str, Any] = {}
    for name, thing, inner in (
        ("dataset", getattr(loader, "dataset", None), "dataset"),
        ("collator", collate, "data_collator"),
    ):
        while (
            hasattr(thing, "__dict__")
            and not isinstance(thing, CODE)
            and id(thing) not in map(id, found.values())
        ):
            found[name] = thing
            name, thing = f"{name}.{inner}", vars(thing).get(inner)
    others = {*map(id, watched)}
    return {name: thing for name, thing in found.items() if id(thing) not in others}


def generators_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random generators among the ``values`` of ``ChangedAttributes``."""
    return {
        name: {key: text for key, text in found.items() if is_generator_json(text)}
        for name, found in values.items()
    }


def of_this_rank(values: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return the ``values`` of ``ChangedAttributes`` for this rank, from a run of ``num_ranks``.

    A rank that the run did not have leaves the generators of datasets and collators as the script makes them: with
    those of another rank it would draw the same numbers.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() < num_ranks:
        return {**values}
    drawn = generators_in({name: found for name, found in values.items() if name.split(".")[0] in OF_DATA})
    return {
        name: {key: value for key, value in found.items() if key not in drawn.get(name, {})}
        for name, found in values.items()
    }


def modules_of(model: nn.Module, name: str) -> dict[str, Any]:
    """Return ``model`` and the modules in it, by names that begin with ``name``."""
    return {f"{name}.{path}" if path else name: module for path, module in model.named_modules()}


class _Watched:
    """The attributes of one object."""

    def __init__(
        self,
        name: str,
        thing: Any,
        left_out: Mapping[type, Collection[str]],
        kinds: frozenset[type] = KINDS,
    ) -> None:
        self._name, self._thing, self._kinds = name, thing, kinds
        self._left_out = {key for kind, keys in left_out.items() if isinstance(thing, kind) for key in keys}
        self._marks = {key: _mark(value) for key, value in self._candidates()}
        self._refused = {key for key, mark in self._marks.items() if mark is None}
        """Attributes that cannot be stored: early ones are not set up by an epoch, later ones were warned of."""
        self._told: set[str] = set()
        """Attributes that were warned of."""
        self._holds_tensors: bool | None = None
        """True if the tensors in it would be lost; None until that is asked."""

    def changed(self) -> dict[str, Any]:
        found = {}
        for key, value in self._candidates():
            if key in self._refused or _is_as(self._marks.get(key), value):
                continue
            text = _text(value)
            if text is None:
                self._tell(key)
            else:
                found[key] = json.loads(text)
        return found

    def objects(self) -> Iterator[tuple[str, Any]]:
        for key, value in vars(self._thing).items():
            is_object = type(value) not in KINDS and not isinstance(value, PARTS)
            if key not in self._left_out and (is_object or key in self._refused):
                yield key, value

    def restore(self, values: Mapping[str, Any]) -> None:
        own = vars(self._thing)
        for key, text in values.items():
            if key in self._left_out:
                continue
            now = own.get(key)
            try:
                if is_generator_json(text) and is_set(now, text):  # others may hold it, too
                    continue
                value = decode(text, generator_from)
            except BadInput as error:
                warnings.warn(f"{self._name}.{key} stays as the script makes it: {error}.", stacklevel=4)
                continue
            if isinstance(now, defaultdict) and type(value) is dict:
                _fill(now, value)
                continue
            is_moved = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            own[key] = value.to(now.device) if is_moved else value

    def reset(self, keys: Collection[str]) -> None:
        """Set the attributes ``keys`` as they were at creation. Tensors stay."""
        own = vars(self._thing)
        for key in keys:
            mark = self._marks.get(key)
            if key not in self._marks:
                if self._kinds is KINDS:  # another value may have been there
                    own.pop(key, None)
            elif isinstance(mark, str):
                self.restore({key: json.loads(mark)})
            elif mark is not None and not isinstance(mark[0], torch.Tensor):
                own[key] = copy.copy(mark[0])

    def warn_of(self, tensors: _TensorsAside) -> None:
        """Warn of attributes with ``tensors`` that have changed since the call before, and that cannot be stored."""
        if self._holds_tensors is None:
            self._holds_tensors = tensors.are_looked_for_in(self._thing)
        if not self._holds_tensors:
            return
        for key, value in [*vars(self._thing).items()]:
            is_stored = type(value) in KINDS and key not in self._refused
            if is_stored or key in self._left_out or key in self._told:
                continue
            if tensors.have_changed((id(self), key), value):
                self._tell(key)

    def _candidates(self) -> Iterator[tuple[str, Any]]:
        for key, value in vars(self._thing).items():
            if type(value) in self._kinds and key not in self._left_out:
                yield key, value

    def _tell(self, key: str) -> None:
        self._refused.add(key)
        self._told.add(key)
        warnings.warn(
            f"{self._name}.{key} changes in training and cannot be kept: it is too long, or holds objects. After a"
            " resume it begins as the script makes it. If training depends on it, keep it in a buffer, or in a"
            " state_dict or a hook that the trainer saves; averaged weights, in memory, by averages= and after_update="
            " of HoldfastCallback.",
            stacklevel=8,
        )


class _TensorsAside:
    """Finds changes of tensors that a script's objects hold, as averaged weights, and that are not those of ``model``.

    Their counters of changes are compared in each step. Changes through ``.data`` do not count, so some elements are
    compared too, in looks 1, 2, 4, 8 and so on, since a device is waited for.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._of_model = {*map(id, model.parameters()), *map(id, model.buffers()), *map(id, model.modules())}
        self._marks: dict[tuple[int, str], tuple[list[tuple[int, int]], list[str]]] = {}
        self._large: set[tuple[int, str]] = set()
        """Attributes that hold too many values to look at in each step, as those of a dataset may."""
        self.num_looks = 0

    def are_looked_for_in(self, thing: Any) -> bool:
        """Return whether the tensors in ``thing`` would be lost.

        Not those of objects of a library, of those that save themselves, and of parts of the model, as it has buffers.
        """
        if thing is not self.model and id(thing) in self._of_model:
            return False
        return package_of(type(thing)) not in HOSTS and not _saves_itself(thing)

    def have_changed(self, place: tuple[int, str], value: Any) -> bool:
        """Return whether the tensors in ``value`` differ from those at the last call for ``place``."""
        found = None if place in self._large else self._tensors_in(value)
        if found is None:
            self._large.add(place)
            return False
        before = self._marks.get(place)
        versions = [(id(each), changes_of(each)) for each in found]
        compares = before is None or self.num_looks & (self.num_looks - 1) == 0
        samples = [_sample(each) for each in found[:: len(found) // 4 + 1]] if compares else before[1]
        self._marks[place] = versions, samples
        return before not in (None, self._marks[place])

    def _tensors_in(self, value: Any) -> list[torch.Tensor] | None:
        """Return the tensors in ``value`` that are not the model's; None if it holds too many values."""
        found: list[torch.Tensor] = []
        waiting, num_seen = [(value, 0)], 0
        while waiting:
            each, depth = waiting.pop()
            num_seen += 1
            if isinstance(each, torch.Tensor):
                found += [each] * (id(each) not in self._of_model)
            elif isinstance(each, nn.Module):
                inside = [] if id(each) in self._of_model else [*each.parameters(), *each.buffers()]
                waiting += [(tensor, depth) for tensor in inside]
            elif depth < DEPTH and not _is_beside(each):
                inside = each.values() if isinstance(each, dict) else each
                inside = inside if isinstance(each, CONTAINERS) else getattr(each, "__dict__", {}).values()
                if num_seen + len(inside) > MOST_ITEMS:
                    return None
                waiting += [(item, depth + 1) for item in [*inside]]
        return found


def _saves_itself(thing: Any) -> bool:
    """Return whether a class of the script's own says what is saved of ``thing``."""
    own = [kind for kind in type(thing).__mro__ if package_of(kind) not in (*HOSTS, "torch")]
    return any(name in vars(kind) for kind in own for name in SAVING)


def _is_beside(value: Any) -> bool:
    """Return whether ``value`` is a scalar, code, an optimizer, or an object of a library around the script."""
    if isinstance(value, (*SCALARS, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType)):
        return True
    return any(package_of(kind) in HOSTS for kind in type(value).__mro__)


def package_of(kind: type) -> str:
    """Return the name of the package that a class is from."""
    return kind.__module__.partition(".")[0]


def _sample(tensor: torch.Tensor) -> str:
    """Return some elements of ``tensor`` as text; none of one that is not contiguous."""
    local = local_held(tensor).detach()
    if local.layout != torch.strided or local.is_meta or not local.is_contiguous():
        return ""
    flat = local.view(-1)
    return repr(flat[:: flat.numel() // 16 + 1].tolist())


def _mark(value: Any) -> Any:
    """Return the value, a copy or its JSON for ``_is_as`` to compare with; None if it has no such form."""
    if type(value) in SCALARS or _is_frozen(value):
        return (value,)
    if isinstance(value, torch.Tensor):
        return value, None if value.is_inference() else value._version
    if not isinstance(value, GENERATORS) and _holds_scalars(value):
        return (copy.copy(value),)
    return _text(value)


def _is_as(mark: Any, value: Any) -> bool:
    """Return whether ``value`` is still as it was when ``mark`` was made."""
    if isinstance(mark, str):
        return mark == _text(value)
    if mark is None or type(mark[0]) is not type(value):
        return False
    if isinstance(value, torch.Tensor):
        return mark[0] is value and not value.is_inference() and mark[1] == value._version
    if type(value) in SCALARS:
        return mark[0] is value or mark[0] == value
    return _holds_scalars(value) and mark[0] == value


def _is_frozen(value: Any) -> bool:
    return type(value) is tuple and _holds_scalars(value)


def _holds_scalars(value: Any) -> bool:
    if isinstance(value, np.ndarray) or len(value) > MOST_ITEMS:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(type(item) in SCALARS for item in items)


def _text(value: Any) -> str | None:
    """Return ``value`` as JSON; None if it has no such form or is too long."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.nbytes > MOST_CHARACTERS // 2:
            return None
    elif type(value) in CONTAINERS and (len(value) > MOST_ITEMS or _is_long(value)):
        return None
    for each in (value, _without_factories(value)) if type(value) is defaultdict else (value,):
        with suppress(BadInput, ValueError, TypeError, RecursionError):
            text = json.dumps(encode(each, known=generator_json))
            return text if len(text) <= MOST_CHARACTERS else None
    return None


def _is_long(value: Any) -> bool:
    """Return whether the items and bytes in ``value`` are too many, before datasets are made JSON to be measured."""
    waiting, room = [value], MOST_CHARACTERS
    while waiting and room >= 0:
        each = waiting.pop()
        if isinstance(each, (torch.Tensor, np.ndarray)):
            room -= each.nbytes
        elif isinstance(each, (str, bytes, bytearray)):
            room -= len(each)
        elif isinstance(each, CONTAINERS):
            room -= len(each)
            if room >= 0:
                waiting += [*each, *each.values()] if isinstance(each, dict) else each
    return room < 0


def _without_factories(value: Any) -> Any:
    """Return a dict in the place of a ``defaultdict``, whose function that makes values may be any."""
    if type(value) is not defaultdict:
        return value
    return {key: _without_factories(item) for key, item in value.items()}


def _fill(target: defaultdict, values: dict[Any, Any]) -> None:
    """Give ``target`` the ``values``; a dict among them fills what its function makes."""
    target.clear()
    for key, value in values.items():
        made = target[key] if type(value) is dict and target.default_factory is not None else None
        if isinstance(made, defaultdict):
            _fill(made, value)
        else:
            target[key] = value


TORCHS_OWN = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Ways of accelerate to train that leave the state to torch: one process, or several of DDP. FSDP2 is one more."""
NOT_TRIED = ("tp_enabled", "cp_enabled", "sp_enabled")
"""Kinds of parallelism that accelerate adds to FSDP2, and that were never resumed."""


def innermost(optimizer: Any) -> Any:
    """Return torch's optimizer inside wrappers like accelerate's, which do not support hooks."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_unless_torchs(accelerator: Any) -> None:
    """Raise ``BadInput`` if something other than torch lays out the state of what ``accelerator`` trains."""
    by = accelerator.distributed_type.value
    if getattr(accelerator, "is_fsdp2", False):
        config = getattr(accelerator, "parallelism_config", None)
        if any(getattr(config, name, False) for name in NOT_TRIED):
            raise BadInput(
                "accelerate adds tensor, context or sequence parallelism to FSDP2 here, which this adapter does not"
                " know: leave it out of parallelism_config, or use holdfast.Checkpointer in a loop of your own"
            )
    elif by == "FSDP":
        raise BadInput(
            "accelerate trains by FSDP1 here, whose state is flattened: set fsdp_version: 2 in its configuration, or"
            " FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    elif by not in TORCHS_OWN:
        raise BadInput(
            f"accelerate trains by {by} here, and its state is not one that this adapter knows: train in one process,"
            " or in several with DistributedDataParallel or FSDP2. Of a DeepSpeed engine"
            " holdfast.integrations.deepspeed saves and loads commits."
        )
