"""Keys of Megatron's distributed checkpoints, and the tensors of the model that they stand for.

A key is a parameter's name in the whole model, or that name after ``optimizer.state`` and a slot. Layers, and experts
inside them, are stacked in one tensor or have numbered keys; here each has its own name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from ..entry_keys import canonical

MASTERS = ("fp32_param", "master_param")
"""Further names of the slot ``param``, the fp32 master."""
MOST = 1 << 20
"""A limit for the tensors in a stack, which no number of layers and experts reaches."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>[^.]+)\.(?P<name>.+)")
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_OBJECT = re.compile(r"(?P<name>.+)/shard_(?P<place>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")


class TensorName(NamedTuple):
    """A tensor of the model, or, with a ``slot``, of its optimizer."""

    name: str
    slot: str | None


class ObjectPart(NamedTuple):
    """One part of an object that ranks stored in parts: its name, its place, and the shape of the grid of parts."""

    name: str
    place: tuple[int, ...]
    shape: tuple[int, ...]


def named(key: str) -> TensorName:
    """Return the name and slot of the tensor ``key``.

    >>> named("chained_0.optimizer.state.fp32_param.module.decoder.layers.mlp.linear_fc2.weight")
    TensorName(name='decoder.layers.mlp.linear_fc2.weight', slot='param')
    """
    match = _STATE.fullmatch(key)
    if match is None:
        return TensorName(canonical(key), None)
    slot = "param" if match["slot"] in MASTERS else match["slot"]
    return TensorName(canonical(match["name"]), slot)


def is_flat(key: str) -> bool:
    """Return whether ``key`` is a buffer of the distributed optimizer, which holds several parameters."""
    return _FLAT.match(key) is not None


def shard_of(key: str) -> ObjectPart | None:
    """Return the part of an object that ``key`` stands for; None if ranks did not store it in parts.

    >>> shard_of("rng_state/shard_0.1_1.2")
    ObjectPart(name='rng_state', place=(0, 1), shape=(1, 2))
    """
    match = _OBJECT.fullmatch(key)
    if match is None:
        return None
    place, shape = (tuple(map(int, match[name].split("."))) for name in ("place", "shape"))
    return ObjectPart(match["name"], place, shape)


def unstacked(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that are stacked in the one of ``name`` and ``shape``, with their indices along the first axes.

    >>> list(unstacked("decoder.layers.mlp.experts.experts.linear_fc2.bias", (1, 2, 8)))[-1]
    ('decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.bias', (0, 1))
    >>> list(unstacked("decoder.layers.3.mlp.linear_fc2.bias", (8,)))
    [('decoder.layers.3.mlp.linear_fc2.bias', ())]
    """
    template, axes = _template(name)
    if axes > len(shape) or prod(shape[:axes]) > MOST:
        raise ValueError(f"{name} {list(shape)} is no stack of layers")
    for place in product(*map(range, shape[:axes])):
        yield template.format(*place), place


def _template(name: str) -> tuple[str, int]:
    """Return ``name`` as a template with a placeholder for each missing number, and the count of placeholders."""
    parts, found, axes = name.replace("{", "{{").replace("}", "}}").split("."), list[str](), 0
    for part, after, before in zip(parts, [*parts[1:], ""], ["", *parts], strict=False):
        of_experts = part == before == "experts"
        found.append("local_experts" if of_experts else part)
        if (of_experts or part == "layers") and after and not after.isdecimal():
            found.append("{}")
            axes += 1
    return ".".join(found), axes
