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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import BadInput
from ...quantities import shown
from ...state.encoding import decode, encode

SCALARS = (bool, int, float, str, type(None))
CONTAINERS = (list, dict, tuple, set, frozenset, deque, Counter, OrderedDict, defaultdict)
KINDS = frozenset((*SCALARS, *CONTAINERS, torch.Tensor, np.ndarray))
"""The exact types of values that are stored."""
PARTS = (nn.Module, torch.optim.Optimizer, torch.Tensor, types.ModuleType)
"""Types that are stored elsewhere, or are no state."""
OF_MODULES = frozenset({*vars(nn.Module()), "_output_capturing_hooks_installed"})
"""Attributes of modules that are no state. The last one is transformers' mark on a model whose hooks are there: in
another process they are not, and with the mark they would never be installed."""
MOST_ITEMS, MOST_CHARACTERS = 4096, 64 * 1024
"""Limits for the items of a list or dict, and for the JSON; longer attributes cause a warning and are not stored."""


class ChangedAttributes:
    """Plain attributes of ``objects``, by name, and which parameters of ``model`` require gradients.

    ``left_out`` lists attributes that are no state. Created when the script has set everything up.
    """

    def __init__(
        self, objects: Mapping[str, Any], model: nn.Module, left_out: Mapping[type, Collection[str]]
    ) -> None:
        self._objects = {name: _Watched(name, thing, left_out) for name, thing in objects.items()}
        self._parameters = dict(model.named_parameters())
        self._told: set[str] = set()
        self._required = {name: p.requires_grad for name, p in self._parameters.items()}

    def changed(self) -> dict[str, Any]:
        """Return what has changed since creation: values by object and attribute, as JSON."""
        values = {name: found for name, each in self._objects.items() if (found := each.changed())}
        required = {
            name: parameter.requires_grad
            for name, parameter in self._parameters.items()
            if parameter.requires_grad != self._required[name]
        }
        return {"values": values, "requires_grad": required}

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
        set_required(self._parameters, changed["requires_grad"])


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


def datasets_of(loader: Any) -> dict[str, Any]:
    """Return the dataset of ``loader`` and the datasets nested in it, which hooks may set up, by name."""
    found: dict[str, Any] = {}
    data = getattr(loader, "dataset", None)
    while data is not None and hasattr(data, "__dict__") and id(data) not in map(id, found.values()):
        found["dataset" + ".dataset" * len(found)] = data
        data = getattr(data, "dataset", None)
    return found


def modules_of(model: nn.Module, name: str) -> dict[str, Any]:
    """Return ``model`` and the modules in it, by names that begin with ``name``."""
    return {f"{name}.{path}" if path else name: module for path, module in model.named_modules()}


class _Watched:
    """The attributes of one object."""

    def __init__(self, name: str, thing: Any, left_out: Mapping[type, Collection[str]]) -> None:
        self._name, self._thing = name, thing
        self._left_out = {key for kind, keys in left_out.items() if isinstance(thing, kind) for key in keys}
        self._marks = {key: _mark(value) for key, value in self._candidates()}
        self._refused = {key for key, mark in self._marks.items() if mark is None}
        """Attributes that cannot be stored: early ones are not set up by an epoch, later ones were warned of."""

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
            value, now = decode(text), own.get(key)
            if isinstance(now, defaultdict) and type(value) is dict:
                _fill(now, value)
                continue
            is_moved = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            own[key] = value.to(now.device) if is_moved else value

    def _candidates(self) -> Iterator[tuple[str, Any]]:
        for key, value in vars(self._thing).items():
            if type(value) in KINDS and key not in self._left_out:
                yield key, value

    def _tell(self, key: str) -> None:
        self._refused.add(key)
        warnings.warn(
            f"{self._name}.{key} changes in training and cannot be kept: it is too long, or holds objects. After a"
            " resume it begins as the script makes it. If training depends on it, keep it in a buffer, or in a"
            " state_dict or a hook that the trainer saves.",
            stacklevel=8,
        )


def _mark(value: Any) -> Any:
    """Return the value, a copy or its JSON for ``_is_as`` to compare with; None if it has no such form."""
    if type(value) in SCALARS or _is_frozen(value):
        return (value,)
    if isinstance(value, torch.Tensor):
        return value, None if value.is_inference() else value._version
    if _holds_scalars(value):
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
    elif type(value) not in SCALARS and len(value) > MOST_ITEMS:
        return None
    for each in (value, _without_factories(value)) if type(value) is defaultdict else (value,):
        with suppress(BadInput, ValueError, TypeError, RecursionError):
            text = json.dumps(encode(each))
            return text if len(text) <= MOST_CHARACTERS else None
    return None


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
