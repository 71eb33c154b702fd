"""Restore: a source into a live model and its optimizers, each rank what it holds, whoever wrote it and however cut.

Names and shapes are compared first, then everything that is needed is read and verified, and only then is a tensor that
was there before written to. What the optimizer holds is new, and so is filled as it is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import RunMismatch
from ..state.boxes import Box
from ..state.capture import FROM_NAME, TO_NAME, CapturedParameter
from ..state.live import LiveState
from ..state.progress import decode
from ..units import MiB
from .load import Target, read_all
from .source import Source, Stored

FLOATS = ("F64", "F32", "F16", "BF16")
BATCH_BYTES = 256 * MiB
IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable", "maximize"}
"""Of a parameter group: how the update is computed here, which is not carried over."""


@dataclass(frozen=True)
class From:
    """The state at ``path``, of whatever format, to begin from. ``rename`` gives the names in it by regular expressions
    over names here, the first that matches in full. ``partial`` leaves what it does not have as it is, and what is not
    wanted of it unread. ``cast`` converts floating-point tensors of another type."""

    path: str | Path
    rename: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    cast: bool = False


@dataclass
class Restored:
    """What came of it. Names of tensors; ``without_state`` are the parameters whose optimizer state begins anew."""

    step: int
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)
    hyper_parameters: bool = False
    """Whether the source had those of every parameter group."""


@dataclass(frozen=True)
class _Wanted:
    """``box`` of ``stored`` goes to the tensor ``slot`` of ``name`` here."""

    name: str
    slot: str
    stored: Stored
    box: Box


def restore(state: LiveState, source: Source, options: From) -> Restored:
    """Bring the tensors of ``state``, and the hyper-parameters of its optimizers, to what ``source`` has.

    Raises ``RunMismatch`` if it is of another model, ``Damaged`` if it is not whole; with nothing of the model changed.
    """
    found = Restored(int(source.progress.get("step") or 0))
    wanted = _matched(state, source, options, found)
    live = [each for each in wanted if each.slot in ("param", "buffer")]
    slots = [each for each in wanted if each.slot not in ("param", "buffer")]
    for part in sorted({int(n) for each in live for n in each.stored.pieces.within(each.box).part}):
        source.check(part)
    before = [dict(optimizer.state) for optimizer in state.optimizers], dict(state.residuals)
    state.forget_optimizer_state()
    try:
        _load(state, source, slots)
    except BaseException:
        for optimizer, held in zip(state.optimizers, before[0], strict=True):
            optimizer.state.clear()
            optimizer.state.update(held)
        state.residuals.update(before[1])
        raise
    values = source.progress.get("values", {})
    state.load_values(
        {p.name: values[p.name] for p in state.parameters if state.is_trained(p) and p.name in values}
    )
    _load(state, source, live)
    found.hyper_parameters = _set_hyper_parameters(state, source.progress)
    return found


def told(restored: Restored) -> list[str]:
    """What of a model is not as the source had it, for a person."""
    told = []
    if restored.missing:
        told.append(f"it has no {_some(restored.missing)}, which stay as they are")
    if restored.unused:
        told.append(f"nothing here wanted its {_some(restored.unused)}")
    if restored.cast:
        told.append(f"{_some(restored.cast)} were converted to another type")
    if restored.without_state:
        told.append(f"it has no optimizer state of {_some(restored.without_state)}, which begins anew")
    if not restored.hyper_parameters:
        told.append(
            "it does not say the hyper-parameters of every parameter group; those of the optimizer stay"
        )
    return told


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _matched(state: LiveState, source: Source, options: From, found: Restored) -> list[_Wanted]:
    """What there is of what is wanted. Raises ``RunMismatch`` unless it is just that, or ``options`` allow the rest."""
    by_name: dict[str, dict[str, Stored]] = {}
    for stored in source.atoms.values():
        by_name.setdefault(source.aliases.get(stored.atom.name, stored.atom.name), {})[stored.atom.slot] = (
            stored
        )
    wanted: list[_Wanted] = []
    used: set[str] = set()
    is_training = bool(source.progress.get("groups"))
    weights_only = not any(each.keys() - {"param", "buffer"} for each in by_name.values())
    for parameter in state.parameters:
        there = _there(parameter.names, by_name, options)
        if there is None:
            found.missing.append(parameter.name)
            continue
        slots = by_name[there]
        used.add(there)
        box = state.boxes[parameter.name]
        wanted.append(
            _like(parameter.name, "param", slots["param"], box, parameter.parameter, options, found)
        )
        if not state.is_trained(parameter):
            found.unused += [f"{there}/{slot}" for slot in slots if slot != "param"]
            continue
        if slots.keys() == {"param"}:
            found.without_state.append(parameter.name)
        wanted += [
            _Wanted(parameter.name, slot, stored, _box_of_slot(parameter, slot, stored, box))
            for slot, stored in slots.items()
            if slot not in ("param", "buffer")
        ]
    for key, (atom, tensor) in state.buffers().items():
        there = _there((atom.name,), by_name, options)
        if there is None:
            found.missing.append(key)
            continue
        used.add(there)
        stored = by_name[there].get("buffer") or by_name[there]["param"]
        wanted.append(_like(atom.name, "buffer", stored, Box.whole(atom.shape), tensor, options, found))
    found.unused += [name for name in by_name if name not in used]
    odd = [f"it has no {name}" for name in found.missing] + [
        f"nothing here wants its {n}" for n in found.unused
    ]
    if weights_only and is_training:  # its optimizers had none yet
        found.without_state = []
    if not weights_only:
        odd += [f"it has no optimizer state of {name}" for name in found.without_state]
    if odd and not options.partial:
        raise RunMismatch(
            f"{source.path} is not the state of this model: {_some(odd)}. Build model and optimizers as"
            " they were, give rename= for other names, or partial=True to take what there is."
        )
    return wanted


def _there(names: tuple[str, ...], by_name: Mapping[str, Any], options: From) -> str | None:
    """The name in the source of what has ``names`` here."""
    for name in names:
        for pattern, replacement in options.rename.items():
            if re.fullmatch(pattern, name):
                name = re.sub(pattern, replacement, name)
                break
        if name in by_name:
            return name
    return None


def _like(
    name: str, slot: str, stored: Stored, box: Box, tensor: torch.Tensor, options: From, found: Restored
) -> _Wanted:
    """Raises ``RunMismatch`` if ``stored`` is of another shape or type than ``tensor``."""
    atom, dtype = stored.atom, TO_NAME[tensor.dtype]
    if atom.shape != tuple(tensor.shape):
        raise RunMismatch(
            f"{name} is {list(atom.shape)} in the source and {list(tensor.shape)} here. Build the model as it was."
        )
    if atom.dtype != dtype:
        if not (options.cast and atom.dtype in FLOATS and dtype in FLOATS):
            raise RunMismatch(
                f"{name} is {atom.dtype} in the source and {dtype} here. Pass cast=True to convert floating-point"
                " tensors, or build the model in that type."
            )
        found.cast.append(name)
    return _Wanted(name, slot, stored, box)


def _box_of_slot(parameter: CapturedParameter, slot: str, stored: Stored, box: Box) -> Box:
    """What this rank holds of a tensor of the optimizer. Raises ``RunMismatch`` if that cannot be told."""
    shape = stored.atom.shape
    if shape == tuple(parameter.parameter.shape):
        return box
    if stored.atom.elements > 1 and box != Box.whole(tuple(parameter.parameter.shape)):
        raise RunMismatch(
            f"{parameter.name}/{slot} is {list(shape)} and not of its parameter's shape, of which this rank holds"
            f" {box.to_json()}: how it is cut cannot be told. Resume on one rank, or with the parameters unsharded."
        )
    return Box.whole(shape)


def _load(state: LiveState, source: Source, wanted: list[_Wanted]) -> None:
    """Read what is wanted, so many bytes at once, and put it where it is held."""
    batch: list[_Wanted] = []
    for number, each in enumerate(wanted):
        batch.append(each)
        nbytes = sum(one.box.elements * one.stored.atom.itemsize for one in batch)
        if nbytes >= BATCH_BYTES or number == len(wanted) - 1:
            _load_batch(state, source, batch)
            batch = []


def _load_batch(state: LiveState, source: Source, wanted: list[_Wanted]) -> None:
    targets, tensors = [], []
    for each in wanted:
        atom = each.stored.atom
        tensor = torch.empty(each.box.shape, dtype=FROM_NAME[atom.dtype])
        array = tensor.reshape(-1).view(torch.uint8).numpy().view(f"V{atom.itemsize}").reshape(each.box.shape)
        targets.append(Target(each.stored, each.box, array))
        tensors.append(tensor)
    read_all(source, targets)
    for each, tensor in zip(wanted, tensors, strict=True):
        if each.slot != "buffer" and each.box == state.boxes[each.name]:
            state.load_part(each.name, each.slot, tensor, each.box)
        else:
            state.load({f"{each.name}/{each.slot}": tensor})


def _set_hyper_parameters(state: LiveState, progress: Mapping[str, Any]) -> bool:
    """Give each parameter group the hyper-parameters that the source has for its parameters, where it has the same for
    all; whether it had them for all groups."""
    of_name: dict[str, dict[str, Any]] = {}
    for group, names in _groups_of(progress):
        of_name |= dict.fromkeys(names, group)
    complete = True
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            names = [state.name_of[id(p)] for p in group["params"]]
            theirs = [of_name.get(name) for name in names]
            if not theirs or theirs[0] is None or any(each != theirs[0] for each in theirs):
                complete = False
                continue
            group.update(
                {k: decode(v) for k, v in theirs[0].items() if k in group and k not in IMPLEMENTATION}
            )
    return complete


def _groups_of(progress: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """The parameter groups of a source, each with its hyper-parameters and the names in it."""
    groups, names = progress.get("groups", []), progress.get("group_parameters")
    if names is None and "replay" in progress:  # of a Checkpointer: by optimizer
        pairs = zip(groups, progress["replay"]["parameters"], strict=True)
        return [pair for each in pairs for pair in zip(*each, strict=True)]
    return list(zip(groups, names or [], strict=False))
