"""Numbers and small tensors that modules keep in attributes, as JSON.

No ``state_dict`` holds them. A module that changes a buffer with ``persistent=False`` may keep there what belongs to
the buffer, such as the length for which frequencies of a position encoding were computed. What has changed since the
model was made is stored beside the buffer. Called for the runs of a Checkpointer and of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..errors import BadInput
from .capture import BufferPlace
from .encoding import decode, encode

Attributes = dict[str, dict[str, Any]]
"""The attributes of modules as JSON, by the path of the module."""
SMALL = 16
"""The most elements of a tensor in an attribute of a module that is kept."""


def made_attributes(places: Mapping[str, BufferPlace]) -> Attributes:
    """Return the attributes of all modules that hold the buffers at ``places``."""
    return {path: small_attributes(module) for path, module in _modules(places, places).items()}


def changed_attributes(
    places: Mapping[str, BufferPlace], names: Iterable[str], made: Attributes
) -> Attributes:
    """Return the attributes that are not as ``made``, of each module that holds one of the buffers ``names``."""
    changed: Attributes = {}
    for path, module in _modules(places, names).items():
        before = made.get(path, {})
        changed[path] = {
            key: value for key, value in small_attributes(module).items() if before.get(key) != value
        }
    return changed


def restore_attributes(places: Mapping[str, BufferPlace], changed: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the attributes that ``changed_attributes`` returned. Those of modules without such a buffer are skipped."""
    for path, module in _modules(places, places).items():
        for name, value in changed.get(path, {}).items():
            setattr(module, name, decode(value))


def _modules(places: Mapping[str, BufferPlace], names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules that hold the buffers ``names``, by path."""
    return {name.rpartition(".")[0]: places[name][0] for name in names}


def small_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes that are numbers or small tensors, as JSON."""
    found, buffers = {}, set(map(id, module._buffers.values()))  # another name of a buffer remains one
    for name, value in vars(module).items():
        is_number = type(value) in (bool, int, float)
        is_small = type(value) is torch.Tensor and value.numel() <= SMALL and id(value) not in buffers
        if name != "training" and (is_number or is_small):
            with suppress(BadInput):  # a tensor of a kind that is not stored
                found[name] = encode(value)
    return found
