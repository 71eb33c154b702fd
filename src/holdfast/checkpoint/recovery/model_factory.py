"""Factory of models that are only parameters and buffers, and of optimizers of a given class, without the script.

For callers that know a run's tensors by name and its optimizers by class, but do not have the code that made them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...state.encoding import decode
from ...state.live_state import LiveState


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a tree of modules that holds ``tensors`` at their names: parameters as such, others as buffers."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module: Any = root
        for part in path:
            module = module._modules.setdefault(part, nn.Module())
        held = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
        held[leaf] = tensor
    return root


def members_of(state: LiveState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group."""
    return [[state.name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def places_of(optimizers: Sequence[Sequence[Sequence[str]]]) -> dict[str, tuple[int, int]]:
    """Return for each parameter the numbers of its optimizer and group, from the ``members_of`` all optimizers."""
    return {
        name: (number, group)
        for number, groups in enumerate(optimizers)
        for group, names in enumerate(groups)
        for name in names
    }


def optimizer_of(
    kind: Any,
    members: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
    defaults: Any = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of the class ``kind`` without state.

    Made as ``copy.deepcopy`` does, by ``__setstate__`` instead of ``__init__``. ``groups`` and ``defaults`` are
    hyper-parameters, as JSON.
    """
    made = kind.__new__(kind)
    made.__setstate__({
        "defaults": decode(defaults or {}),
        "state": defaultdict(dict),
        "param_groups": [
            {"params": [parameters[name] for name in names], **{k: decode(v) for k, v in group.items()}}
            for names, group in zip(members, groups, strict=True)
        ],
    })  # fmt: skip
    return made
