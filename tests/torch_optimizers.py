"""Every optimizer of ``torch.optim``, each with its options one by one and some together."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import torch

WAYS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}]
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
DECAY = {"weight_decay": 0.1}
UP = {"maximize": True}
RATE = {"lr": torch.tensor(0.01)}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}, {"rho": 0.5, **DECAY}, UP],
    "Adagrad": [{}, {"lr_decay": 0.1, **DECAY}, {"initial_accumulator_value": 0.5, **UP}],
    "Adam": [{}, {"amsgrad": True}, {**DECAY, **UP}, {"decoupled_weight_decay": True, **DECAY}, RATE],
    "AdamW": [{}, {"amsgrad": True, **UP}, {"betas": (0.5, 0.6), **DECAY}, RATE],
    "Adamax": [{}, {"betas": (0.5, 0.6), **DECAY}, UP],
    "ASGD": [{}, {"t0": 3, **DECAY}, {"lambd": 0.1, **UP}],
    "NAdam": [{}, {"momentum_decay": 0.1}, {"decoupled_weight_decay": True, **DECAY}, UP],
    "RAdam": [{}, {"decoupled_weight_decay": True, **DECAY}, UP, {"betas": (0.5, 0.6)}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True, **UP}, {"momentum": 0.5, "centered": True, **DECAY}],
    "Rprop": [{}, {"etas": (0.3, 1.3)}, UP],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, DECAY,
            {"momentum": 0.9, "dampening": 0.5, **UP}],
    "Adafactor": [{}, DECAY, UP],
    "Muon": [{}, {"nesterov": False}, {"ns_steps": 2, "weight_decay": 0.0}],
}  # fmt: skip


def configurations(one_way: bool = False) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name, the class and the options of each that can be made on this machine.

    With ``one_way`` the options of a class take turns with the ways: each option is there once.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind, choices in OPTIONS.items():
        ways = [{}] if kind == "Muon" else [*[{"fused": True}] * (kind in FUSED), *WAYS]
        for (i, options), (j, way) in product(enumerate(choices), enumerate(ways)):
            if one_way and (i - j) % len(ways):
                continue
            if isinstance(options.get("lr"), torch.Tensor) and way.get("foreach"):
                continue  # torch takes it with capturable=True alone, and that on accelerators
            text = " ".join(f"{key}={value}" for key, value in {**options, **way}.items())
            found[f"{kind} {text}".strip()] = (kind, {**options, **way})
    return found


def make(kind: str, options: dict[str, Any], parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of that class; of Muon, which takes matrices alone, for those."""
    copied = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(torch.optim, kind)([p for p in parameters if p.dim() == 2 or kind != "Muon"], **copied)
