"""Initial values of a fresh run: the model's own where they are real, made unit by unit where they are on ``meta``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ModelNotSupported
from . import rng
from .blocks import install
from .units import Unit

Init = Callable[[nn.Module], Any]
"""Initialises the parameters that one module itself holds."""


def initial_values(model: nn.Module, unit: Unit, init: Init | None, seed: int) -> dict[str, torch.Tensor]:
    """The initial values of a unit's parameters: their own where they are real; where they are on ``meta``,
    made by ``init`` or by the modules' own ``reset_parameters``. Each unit draws from its own key.

    Raises ``ModelNotSupported`` for a parameter that nothing initialises.
    """
    originals = {m.name: m.owned.captured.parameter for m in unit.members}
    made = {name: nn.Parameter(_fresh(p), p.requires_grad) for name, p in originals.items()}
    missing = {id(made[name]) for name, p in originals.items() if p.is_meta}
    for member in unit.members:
        install(member.owned, made[member.name])
    rng.seed_generators(rng.key_seed(seed, 0, 0, f"init {unit.name}"), torch.device("cpu"))
    try:
        with torch.no_grad():
            for module in _holders(model, unit):
                if any(id(p) in missing for p in module._parameters.values()):
                    _initialise(model, module, init)
    finally:
        for member in unit.members:
            install(member.owned, member.owned.captured.parameter)
    for name, parameter in originals.items():
        if parameter.is_meta and bool(torch.isnan(made[name]).any()):
            raise ModelNotSupported(
                f"nothing initialises parameter {name}, which is on meta. Pass init=, a function that initialises the "
                "parameters that one module itself holds."
            )
    return {name: (made[name] if p.is_meta else p).detach() for name, p in originals.items()}


def _fresh(parameter: nn.Parameter) -> torch.Tensor:
    """Memory for an initialiser to fill: a copy of a real parameter, or nothing but NaN."""
    if not parameter.is_meta:
        return parameter.detach().clone()
    return torch.full(parameter.shape, float("nan"), dtype=parameter.dtype, device="cpu")


def _initialise(model: nn.Module, module: nn.Module, init: Init | None) -> None:
    """Initialise the parameters that ``module`` itself holds."""
    own = init or getattr(model, "_init_weights", None) or getattr(model, "init_weights_of", None)
    if own is not None:
        own(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    else:
        raise ModelNotSupported(
            f"{type(module).__name__} is on meta and has no reset_parameters(). Pass init=, a function that "
            "initialises the parameters of one module."
        )


def _holders(model: nn.Module, unit: Unit) -> list[nn.Module]:
    """The modules that hold the parameters of ``unit``, in the model's order."""
    holders = {id(module) for member in unit.members for module, _ in member.owned.places}
    return [module for module in model.modules() if id(module) in holders]
