"""The initial values of a fresh run: the model's own, or created unit by unit for parameters on ``meta``.

A Hugging Face model is initialised as by its own constructor: every module by ``reset_parameters``, then every module
by ``_init_weights``, children first, because some modules are initialised by their parent. All other units are on
``meta`` meanwhile, so that nothing is drawn for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import ModelNotSupported
from .. import rng
from ..memory.block_states import BlockState
from . import peft_adapters
from .blocks import install

Init = Callable[[nn.Module], Any]
"""Function that initialises the parameters that one module itself holds."""


def initial_values(
    model: nn.Module, unit: BlockState, init: Init | None, seed: int, known: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the initial values of a unit's parameters, except those that are ``known``.

    Real parameters keep their values. Parameters on ``meta`` are initialised by ``init``, ``_init_weights`` or the
    modules' own ``reset_parameters``. Each unit draws from its own random key. Raises ``ModelNotSupported`` for a
    parameter that nothing initialises.
    """
    members = [member for member in unit.members if member.name not in known]
    originals = {m.name: m.owned.captured.parameter for m in members}
    lacking = [m.name for m in members if m.owned.captured.as_stored and originals[m.name].is_meta]
    if lacking:
        raise ModelNotSupported(
            f"parameter {lacking[0]} of a quantised layer is on meta, without values, and cannot be initialised. Pass"
            " source=, the weights that holdfast.pretrained(FOLDER) returns."
        )
    made = {name: nn.Parameter(_fresh(p), p.requires_grad) for name, p in originals.items()}
    missing = {id(made[name]) for name, p in originals.items() if p.is_meta}
    for member in members:
        install(member.owned, made[member.name])
    rng.seed_generators(rng.key_seed(seed, 0, 0, f"init {unit.name}"), torch.device("cpu"))
    try:
        with torch.no_grad(), _others_empty(model, {id(p) for p in made.values()}):
            holders = [
                module
                for module in _children_first(model)
                if any(id(p) in missing for p in module._parameters.values())
            ]
            _initialise(model, holders, init)
    finally:
        for member in members:
            install(member.owned, member.owned.captured.parameter)
    for name, parameter in originals.items():
        if parameter.is_meta and bool(torch.isnan(made[name]).any()):
            raise ModelNotSupported(
                f"nothing initialises parameter {name}, which is on meta. Pass init=, a function that initialises the "
                "parameters that one module itself holds."
            )
    return {name: (made[name] if p.is_meta else p).detach() for name, p in originals.items()}


def _fresh(parameter: nn.Parameter) -> torch.Tensor:
    """Return memory for an initialiser to fill: a copy of a real parameter, or NaN."""
    if not parameter.is_meta:
        return parameter.detach().clone()
    return torch.full(parameter.shape, float("nan"), dtype=parameter.dtype, device="cpu")


def _initialise(model: nn.Module, holders: list[nn.Module], init: Init | None) -> None:
    """Initialise the parameters that ``holders`` themselves hold."""
    if init is not None:
        for module in holders:
            init(module)
        return
    above = callable(getattr(model, "_init_weights", None))
    layers = peft_adapters.layers_of(model)
    added = [module for module in holders if id(module) in layers]
    for module in holders:
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()
        elif not above and id(module) not in layers:
            raise ModelNotSupported(
                f"{type(module).__name__} is on meta and has no reset_parameters(). Pass init=, a function that "
                "initialises the parameters of one module."
            )
    if above:
        _initialise_from_above(model, {id(module) for module in holders} - layers.keys())
    peft_adapters.initialise(model, {id(layers[id(each)]): layers[id(each)] for each in added}.values())


def _initialise_from_above(model: nn.Module, holders: set[int]) -> None:
    """Call ``_init_weights`` on every module that is one of ``holders`` or contains one.

    A model within the model uses its own ``_init_weights``.
    """

    def visit(module: nn.Module, own: Init) -> bool:
        own = getattr(module, "_init_weights", own)
        inside = [visit(child, own) for child in module.children()]
        if id(module) not in holders and not any(inside):
            return False
        own(module)
        return True

    visit(model, model._init_weights)  # type: ignore[arg-type]


def _children_first(model: nn.Module) -> list[nn.Module]:
    """Return every module once, in the order in which ``nn.Module.apply`` visits them."""
    found: list[nn.Module] = []
    model.apply(found.append)
    return list(dict.fromkeys(found))


@contextmanager
def _others_empty(model: nn.Module, kept: set[int]) -> Iterator[None]:
    """Put every parameter that is not among ``kept`` on ``meta`` inside the context; buffers get their values back."""
    parameters, buffers = [], []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept and not parameter.is_meta:
                parameters.append((module, name, parameter))
                empty = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        buffers += [(b, b.clone()) for b in module._buffers.values() if b is not None and not b.is_meta]
    try:
        yield
    finally:
        for module, name, parameter in parameters:
            module._parameters[name] = parameter
        for buffer, value in buffers:
            buffer.copy_(value)
