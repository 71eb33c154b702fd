"""Restores a source into a live model and its optimizers, under any sharding: each rank reads what it holds.

1. Names and shapes are compared.
2. Everything that goes to existing tensors is verified.
3. Optimizer state, which is new, is filled as it is read.
4. Only then are existing tensors written to, so that an error leaves the model as it was.

Hyper-parameters of a group are set only where the source has the same for all its parameters; what the optimizer keeps
under them decides which of its state is needed. Called by ``sources``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import BadInput, RunMismatch
from ..optim.declared_state import ShapedStateOptimizer, anew
from ..optim.joined import member_of
from ..optim.kinds import IMPLEMENTATION, kept_slots
from ..quantities import MiB, packed
from ..state.capture import CapturedParameter
from ..state.encoding import decode
from ..state.layout.overlaps import Key, OverlappingMemory, described, key_names
from ..state.layout.regions import AnyRegion, Region, boxes_of
from ..state.live_state import LiveState
from ..state.plain_tensors import FROM_NAME, TO_NAME, flat_bytes
from ..state.progress import fill_groups
from ..state.quantised_slots import block_size, blocks_in, is_part
from ..state.tensor_entries import STEP
from .entry_keys import nested
from .entry_matching import Allowed, ExpectedTensor, Match, groups_of, match
from .load import ReadTarget, array_of, check_all, mean, read_all, refuse_unequal
from .source import Source, SourceTensor

BATCH_BYTES = 256 * MiB


def restore(state: LiveState, source: Source, allowed: Allowed) -> tuple[Match, bool]:
    """Set the tensors of ``state``, and the hyper-parameters of its optimizers, from ``source``.

    Returns the match, and whether the source had hyper-parameters for every group. Raises ``RunMismatch`` if the source
    belongs to another model, ``Damaged`` if it is damaged. In both cases the model is unchanged, with one exception: a
    file that is rewritten while the last tensors are read leaves a model that must be filled again.
    """
    found = matched(state, source, allowed)
    groups_of(source.progress)  # raises now if the groups are malformed
    live, slots = _wanted(state, found)
    refuse_unequal(source, (each.stored for each in live + slots))
    check_all(source, sorted({number for each in live for number in _parts_of(each)}))
    _refuse_joined(state, source, live)
    before, residuals = [_of_parameters(optimizer) for optimizer in state.optimizers], dict(state.residuals)
    state.forget_optimizer_state()
    try:
        _load(state, source, slots)
        state.load_values(found.values, counts_anew=True)
        _nest(state, found.nested)
        for optimizer, held in zip(state.optimizers, before, strict=True):
            lacking = {p: anew(of) for p, of in held.items() if not optimizer.state.get(p)}
            optimizer.state.update({p: kept for p, kept in lacking.items() if kept})
        source.refuse_rewritten()
    except BaseException:
        state.forget_optimizer_state()
        for optimizer, held in zip(state.optimizers, before, strict=True):
            optimizer.state.update(held)
        state.residuals.update(residuals)
        raise
    _load(state, source, live)
    source.refuse_rewritten()  # closes the gap since the check above
    return found, _set_hyper_parameters(state, source.progress, found)


def needs_of(state: LiveState, source: Source, allowed: Allowed) -> tuple[set[int], list[SourceTensor]]:
    """Return the parts that ``restore`` will read, and the tensors that it will restore.

    Raises every error that ``restore`` would, except for damage. Several ranks call this first, so that none is changed
    if another cannot be.
    """
    live, slots = _wanted(state, matched(state, source, allowed))
    wanted = live + slots
    return {number for each in wanted for number in _parts_of(each)}, [each.stored for each in wanted]


def matched(state: LiveState, source: Source, allowed: Allowed) -> Match:
    trained = {id(p.parameter): p.name for p in state.parameters if state.is_trained(p)}
    keeps = partial(kept_by, state.optimizers, trained, source.progress)
    return match(_forms_of(state), source, allowed, state.elsewhere, keeps)


@dataclass(frozen=True)
class _Wanted:
    """The region ``box`` of ``stored``, to be read into the tensor ``slot`` of ``name``; ``dtype`` converts
    it if set.
    """

    name: str
    slot: str
    stored: SourceTensor
    box: Region
    dtype: torch.dtype | None = None


def _refuse_joined(state: LiveState, source: Source, live: list[_Wanted]) -> None:
    """Raise ``RunMismatch`` where tensors that share memory here have different values in ``source``."""
    held = state.memory()
    wanted: dict[Key, list[_Wanted]] = {}
    for each in live:
        wanted.setdefault((each.name, each.slot), []).append(each)
    for group in described({key: held[key] for key in wanted if key in held}):
        one_each = [member for member in group if len(wanted[tuple(member[0])]) == 1]
        if len(one_each) < 2:
            continue
        values = {}
        for key in (tuple(member[0]) for member in one_each):
            [each] = wanted[key]
            [read] = read_tensors(source, [(each.stored, each.box)])
            values[key] = read.to(held[key].dtype).view(held[key].shape)
        memory = OverlappingMemory.empty(one_each, values)
        made = {
            tuple(key): memory.view(offset, strides, values[tuple(key)]) for key, offset, strides in one_each
        }
        if any(
            there is None or not torch.equal(flat_bytes(there), flat_bytes(values[key]))
            for key, there in made.items()
        ):
            raise RunMismatch(
                f"{key_names(made)} are one memory here, and {source.path} has other values for each, so not all could"
                " be brought back. Give each memory of its own (.clone())."
            )


def _of_parameters(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """Return the entries of an optimizer's state that belong to parameters."""
    return {key: held for key, held in optimizer.state.items() if isinstance(key, torch.Tensor)}


def _parts_of(wanted: _Wanted) -> set[int]:
    """Return the parts that are read for ``wanted``; where copies are averaged, those of all copies."""
    stored = wanted.stored
    each = stored.every if stored.average else (stored.pieces,)
    return {number for pieces in each for number in pieces.within(wanted.box).part.tolist()}


def _forms_of(state: LiveState) -> list[ExpectedTensor]:
    forms = [
        ExpectedTensor(p.names, p.shape, (TO_NAME[p.parameter.dtype],), state.is_trained(p))
        for p in state.parameters
    ]
    return forms + [
        ExpectedTensor((atom.name,), atom.shape, (atom.dtype,), is_buffer=True)
        for atom, _ in state.buffers().values()
    ]


def _wanted(state: LiveState, found: Match) -> tuple[list[_Wanted], list[_Wanted]]:
    """Return the reads into existing tensors, and the reads of optimizer state."""
    live, slots = [], []
    for name, there in found.found.items():
        for slot, stored in there.items():
            if slot == "buffer":
                live.append(_Wanted(name, slot, stored, Region.whole(stored.atom.shape)))
                continue
            parameter = state.parameter(name)
            if state.lacks(name):
                continue
            boxes = _boxes_here(parameter, slot, stored, state.boxes[name], found.values.get(name, {}))
            if slot == "param":
                live += [_Wanted(name, slot, stored, box) for box in boxes]
            else:
                dtype = (
                    parameter.parameter.dtype if _follows(state, parameter, stored, there, found) else None
                )
                slots += [_Wanted(name, slot, stored, box, dtype) for box in boxes]
    return live, slots


def _follows(
    state: LiveState,
    parameter: CapturedParameter,
    stored: SourceTensor,
    there: Mapping[str, SourceTensor],
    found: Match,
) -> bool:
    """Return whether the optimizer keeps ``stored`` in the dtype of its ``parameter``, where the source has another.

    As in torch's ``load_state_dict``, it does; except for single numbers, and where the source's optimizer did not.
    """
    number, atom = state.optimizer_of(parameter), stored.atom
    is_number = not atom.shape and (bool(parameter.shape) or atom.slot == STEP)
    if parameter.name not in found.cast or number is None or is_number:
        return False
    optimizer = member_of(state.optimizers[number], parameter.group or 0)
    return atom.dtype == there["param"].atom.dtype and not isinstance(optimizer, ShapedStateOptimizer)


def _boxes_here(
    parameter: CapturedParameter,
    slot: str,
    stored: SourceTensor,
    region: AnyRegion,
    values: Mapping[str, Any],
) -> list[Region]:
    """Return the regions of a parameter's tensor that this rank holds. Raises ``RunMismatch`` if they are unknown."""
    shape = stored.atom.shape
    if shape == parameter.shape:
        return boxes_of(region)
    if is_part(values, slot):
        size = block_size(values, slot, stored.atom.elements, parameter.shape)
        return [blocks_in(parameter.name, parameter.shape, region, size) if size else Region.whole(shape)]
    if stored.atom.elements > 1 and region != Region.whole(parameter.shape):
        raise RunMismatch(
            f"{parameter.name}/{slot} is {list(shape)} and not of its parameter's shape, of which this rank holds"
            f" {region.to_json()}: how it is cut cannot be told. Resume on one rank, or with the parameters unsharded."
        )
    return [Region.whole(shape)]


def _nest(state: LiveState, slots: Mapping[str, Collection[str]]) -> None:
    """Rebuild lists and dictionaries of optimizers that were flattened into ``slots``, given by parameter.

    The name of each slot has all names on the path, joined by dots.
    """
    for name, apart in slots.items():
        parameter = state.parameter(name)
        number = state.optimizer_of(parameter)
        if number is None or state.lacks(name):
            continue
        held = state.optimizers[number].state[parameter.parameter]
        held.update(nested({slot: held.pop(slot) for slot in apart}))


def _load(state: LiveState, source: Source, wanted: list[_Wanted]) -> None:
    """Read ``wanted`` in batches of ``BATCH_BYTES`` and copy each tensor to its place."""
    for batch in packed(wanted, lambda each: each.box.elements * each.stored.atom.itemsize, BATCH_BYTES):
        _load_batch(state, source, batch)


def _load_batch(state: LiveState, source: Source, wanted: list[_Wanted]) -> None:
    tensors = read_tensors(source, [(each.stored, each.box) for each in wanted])
    for each, read in zip(wanted, tensors, strict=True):
        tensor = read if each.dtype is None else read.to(each.dtype)
        if each.slot != "buffer" and each.stored.atom.shape == state.wholes[each.name]:
            state.load_part(each.name, each.slot, tensor, each.box)
        else:
            state.load({f"{each.name}/{each.slot}": tensor})


def read_tensors(source: Source, wanted: list[tuple[SourceTensor, Region]]) -> list[torch.Tensor]:
    """Return regions of tensor entries as host tensors. Raises ``Damaged``."""
    targets, tensors = [], []
    for stored, box in wanted:
        if stored.average:
            each = [(SourceTensor(stored.atom, pieces), box) for pieces in stored.every]
            tensors.append(mean(read_tensors(source, each)))
            continue
        tensor = torch.empty(box.shape, dtype=FROM_NAME[stored.atom.dtype], device="cpu")
        targets.append(ReadTarget(stored, box, array_of(tensor)))
        tensors.append(tensor)
    read_all(source, targets)
    return tensors


def _set_hyper_parameters(state: LiveState, progress: Mapping[str, Any], found: Match) -> bool:
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    here = [[state.name_of[id(p)] for p in group["params"] if p.requires_grad] for group in groups]
    return set_hyper_parameters(groups, found.in_source(here), progress)


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
