"""Optimizer state that torchao keeps in few bits, as the plain tensors that it is made of.

``torchao.optim`` keeps a moment as one object without memory of its own, around codes, a scale for each block of
elements of the flattened local tensor, and a table of values. Commits hold these as slots of their own
(``exp_avg.codes``, ``exp_avg.scale``, ``exp_avg.qmap``), and the object's class among the values.

Codes and scales are in global coordinates, like everything else, so that another sharding can read them. A block is
never divided: a sharding with a border inside of one is refused. Called by ``live_state``, and where state is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch

from ..errors import ModelNotSupported, RunMismatch
from .encoding import decode, encode
from .layout.regions import AnyRegion, Region, is_distributed, local_held, local_of, whole_blocks
from .tensor_entries import QUANTISED, QUANTISED_CLASSES, is_quantised_class, quantised_in

LIBRARY = "torchao.optim"
MODULES = {name: module for module, _, name in (each.rpartition(".") for each in QUANTISED_CLASSES)}
"""The module of each class of such state. All have the methods of torch's protocol for tensors made of tensors."""
IN_BLOCKS = ("codes", "scale")
"""The parts with one element for one or more of the parameter, in the order of the flattened one."""
FEWEST = 4096
"""The fewest elements of a local tensor whose state torchao quantises (0.18)."""


def is_quantised_tensor(value: Any) -> bool:
    """Return whether ``value`` is such state, or a distributed tensor of it."""
    if type(value) is torch.Tensor:
        return False
    kind = type(local_held(value))
    return MODULES.get(kind.__name__) == kind.__module__


def with_parts(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with the local parts of quantised tensors in their place."""
    found: dict[str, Any] = {}
    for slot, value in slots.items():
        if is_quantised_tensor(value):
            held: Any = local_held(value)
            found |= {f"{slot}.{part}": getattr(held, part) for part in held.__tensor_flatten__()[0]}
        else:
            found[slot] = value
    return found


def quantised_classes(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return as JSON, by slot, what ``restore_values`` needs to make quantised tensors of their parts."""
    found = {}
    for slot, value in slots.items():
        if is_quantised_tensor(value):
            held: Any = local_held(value)
            # a shape is the local one, which another sharding changes
            arguments = [
                None if isinstance(each, tuple) else {"value": encode(each)}
                for each in held.__tensor_flatten__()[1]
            ]
            found[slot] = {QUANTISED: [type(held).__name__, arguments]}
    return found


def restore_values(slots: dict[str, Any], values: Mapping[str, Any], parameter: torch.Tensor) -> None:
    """Put ``values`` into the state of ``parameter``, and make quantised tensors of the parts that are there."""
    for slot, value in values.items():
        if not is_quantised_class(value):
            slots[slot] = value
        elif not is_quantised_tensor(slots.get(slot)):
            name, encoded = value[QUANTISED]
            kind = getattr(import_module(MODULES[name]), name)
            shape = local_of(parameter.detach()).shape
            arguments = [shape if each is None else decode(each["value"]) for each in encoded]
            parts = [local_of(slots.pop(f"{slot}.{part}")).contiguous() for part in kind.tensor_attrs]
            made = kind(*parts, *arguments)
            if made.shape != shape:
                raise RunMismatch(
                    f"{slot} is {list(made.shape)}, and the part of its parameter that this rank holds {list(shape)}"
                )
            slots[slot] = _divided_as(parameter, made)


def _divided_as(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as torchao has it beside ``parameter``: distributed alike."""
    if not is_distributed(parameter):
        return local
    from torch.distributed.tensor import DTensor

    shape = {"shape": parameter.shape, "stride": parameter.stride()}
    made = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **shape)
    return made.to(parameter.device)


def is_part(values: Mapping[str, Any], slot: str) -> bool:
    """Return whether ``slot`` is a part of quantised state, of a parameter with these ``values``, as JSON."""
    return slot.rpartition(".")[0] in quantised_in(values)


def block_size(
    values: Mapping[str, Any], slot: str, elements: int, whole: Sequence[int], region: AnyRegion | None = None
) -> int | None:
    """Return how many elements of a parameter share one element of ``slot``; None if each has its own.

    For example 256 for a scale, and 2 for packed codes of 4 bits.

    Args:
        values: The parameter's values, as JSON, among them the ``quantised_classes`` of its state.
        slot: The name of the part.
        elements: The number of its elements, in ``whole`` or in ``region``.
        whole: The shape of the parameter.
        region: The region of the parameter that has so many; None for the whole.
    """
    if slot.rpartition(".")[2] not in IN_BLOCKS or not is_part(values, slot):
        return None
    size = (prod(whole) if region is None else region.elements) // elements
    return size if size > 1 else None  # codes of 8 bits have the parameter's own shape


def blocks_in(name: str, whole: tuple[int, ...], region: AnyRegion, size: int) -> Region:
    """Return the range of blocks that make up ``region`` of the parameter ``name``.

    Args:
        name: The name of the parameter.
        whole: The shape of the whole parameter.
        region: The region of it that this rank holds.
        size: The elements of one block.

    Raises:
        RunMismatch: The region is not made of whole blocks.
    """
    blocks = whole_blocks(whole, region, size)
    if blocks is None:
        raise RunMismatch(
            f"the optimizer state of {name}, {list(whole)}, is quantised in blocks of {size} elements, and the part of"
            f" it that this rank holds, {region.to_json()}, is not made of whole blocks. Resume with as many ranks as"
            " the run had, or with a number that divides it into whole blocks."
        )
    return blocks


def refuse_divided_blocks(
    shares: Iterable[tuple[Iterable[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]],
    wholes: Mapping[str, tuple[int, ...]],
    boxes: Mapping[str, AnyRegion],
) -> None:
    """Raise ``RunMismatch`` where quantised optimizer state cannot be divided into ``boxes``.

    Either a border lies inside a block, or only some of the writers quantised the state of a parameter.

    Args:
        shares: The tensor entries that each writer stored, as JSON, and its values by parameter.
        wholes: The shapes of the whole parameters, by name.
        boxes: The regions of parameters that this rank holds, by name.
    """
    quantised: dict[str, set[frozenset[str]]] = {}
    for atoms, values in shares:
        for atom in atoms:
            name = atom["name"]
            if name not in wholes:
                continue
            own = values.get(name, {})
            if atom["slot"] == "param":
                quantised.setdefault(name, set()).add(frozenset(quantised_in(own)))
            elif size := block_size(own, atom["slot"], prod(atom["shape"]), wholes[name]):
                blocks_in(name, wholes[name], boxes[name], size)
    for name, found in quantised.items():
        if len(found) > 1:
            raise RunMismatch(
                f"the optimizer state of {name} was quantised by some ranks and kept in full by others, so it cannot be"
                " divided otherwise. Resume with as many ranks as the run had."
            )


def refuse_unequal_quantisation(
    optimizers: Sequence[torch.optim.Optimizer],
    name_of: Mapping[int, str],
    wholes: Mapping[str, tuple[int, ...]],
    ranks: Sequence[Mapping[str, AnyRegion]],
) -> None:
    """Raise ``ModelNotSupported`` where torchao would quantise state on some ranks only, or in blocks not of the whole.

    Args:
        optimizers: The live optimizers.
        name_of: The names of the parameters, by id.
        wholes: The shapes of the whole parameters, by name.
        ranks: The regions of parameters that each rank holds, by name.
    """
    for kind, name, size in _quantised_parameters(optimizers, name_of):
        whole, regions = wholes[name], [held[name] for held in ranks if name in held]
        quantised = {region.elements >= FEWEST and region.elements % size == 0 for region in regions}
        cut = [region for region in regions if whole_blocks(whole, region, size) is None]
        if len(quantised) > 1:
            why = (
                f"the parts have {sorted({region.elements for region in regions})} elements, of which only some are"
                f" quantised: those of {FEWEST} or more, if a multiple of {size}"
            )
        elif True in quantised and cut:
            why = f"the part {cut[0].to_json()} is not made of whole blocks of {size} elements"
        else:
            continue
        raise ModelNotSupported(
            f"{kind} would keep its state of {name}, {list(whole)}, so that it belongs to this number of ranks alone:"
            f" {why}. Use a number of ranks that divides its first dimension evenly, or another block_size."
        )


def _quantised_parameters(
    optimizers: Sequence[torch.optim.Optimizer], name_of: Mapping[int, str]
) -> Iterator[tuple[str, str, int]]:
    """Yield, for each parameter of an optimizer of torchao, the optimizer's class, the name, and a block's elements."""
    for optimizer in (member for each in optimizers for member in getattr(each, "members", (each,))):
        size: Any = getattr(optimizer, "block_size", None)
        is_theirs = any(kind.__module__.startswith(LIBRARY) for kind in type(optimizer).__mro__)
        if is_theirs and isinstance(size, int):
            names = [
                name_of[id(p)]
                for group in optimizer.param_groups
                for p in group["params"]
                if id(p) in name_of
            ]
            yield from ((type(optimizer).__name__, name, size) for name in names)
