"""The initial values of a fresh run: the model's own, or created block by block for parameters on ``meta``.

A Hugging Face model is initialised as by its own constructor: every module by ``reset_parameters``, then every module
by ``_init_weights``, children first, because some modules are initialised by their parent. All other parameters are on
``meta`` meanwhile, so that nothing is drawn for them. Outside of blocks that is done for each module by itself: whether
embedding and head are streamed must not change their values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import ModelNotSupported
from ...state.capture import AS_STORED, plain_paths
from .. import rng
from ..memory.block_states import BlockState
from . import peft_adapters

Init = Callable[[nn.Module], Any]
"""Function that initialises the parameters that one module itself holds."""
Held = tuple[nn.Module, str, nn.Parameter]
"""A module, the name under which it holds a parameter, and the parameter."""


def initial_values(
    model: nn.Module,
    unit: BlockState,
    init: Init | None,
    seed: int,
    known: Collection[str] = (),
    by_module: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the initial values of a unit's parameters, except those that are ``known``.

    Real parameters keep their values. Parameters on ``meta`` are initialised by ``init``, ``_init_weights`` or the
    modules' own ``reset_parameters``. A block draws from a random key of its own. With ``by_module`` each module that
    holds parameters does, so that the values do not depend on which unit they belong to. Raises ``ModelNotSupported``
    for a parameter that nothing initialises.
    """
    members = [member for member in unit.all_members if member.name not in known]
    originals = {m.name: m.owned.captured.parameter for m in members}
    lacking = [m.name for m in members if m.owned.captured.as_stored and originals[m.name].is_meta]
    if lacking:
        raise ModelNotSupported(
            f"parameter {lacking[0]} of a quantised layer is on meta, without values, and cannot be initialised. Pass"
            " source=, the weights that holdfast.pretrained(FOLDER) returns."
        )
    missing = {id(p): name for name, p in originals.items() if p.is_meta}
    made: dict[str, torch.Tensor] = {}
    holders = [
        each for each in _children_first(model) if any(id(p) in missing for p in each._parameters.values())
    ]
    if by_module:
        plain, paths = plain_paths(model), {id(module): path for path, module in model.named_modules()}
        for holder in holders:  # a parameter of several modules has the values of the last
            own = [(holder, name, p) for name, p in holder._parameters.items() if p is not None]
            key = rng.key_seed(seed, 0, 0, f"init {plain[paths[id(holder)]]}")
            drawn = _drawn(model, own, [holder], init, key)
            made |= {missing[number]: value for number, value in drawn.items() if number in missing}
    elif holders:
        own = [(*place, originals[member.name]) for member in members for place in member.owned.places]
        drawn = _drawn(model, own, holders, init, rng.key_seed(seed, 0, 0, f"init {unit.name}"))
        made = {name: drawn[number] for number, name in missing.items()}
    for name, value in made.items():
        if bool(torch.isnan(value).any()):
            raise ModelNotSupported(
                f"nothing initialises parameter {name}, which is on meta. Pass init=, a function that initialises the "
                "parameters that one module itself holds."
            )
    return {name: made[name] if p.is_meta else p.detach() for name, p in originals.items()}


def _drawn(
    model: nn.Module, own: list[Held], holders: list[nn.Module], init: Init | None, key: int
) -> dict[int, torch.Tensor]:
    """Return initial values for the parameters in ``own``, by their ``id``, after ``holders`` were initialised.

    The model holds its own parameters again on return.
    """
    own = [(module, name, p) for module, name, p in own if not (p.is_meta and hasattr(p, AS_STORED))]
    made = {id(p): nn.Parameter(_fresh(p), p.requires_grad) for _, _, p in own}
    rng.seed_generators(key, torch.device("cpu"))
    try:
        for module, name, parameter in own:
            module._parameters[name] = made[id(parameter)]
        with torch.no_grad(), _others_empty(model, {id(p) for p in made.values()}):
            _initialise(model, holders, init)
    finally:
        for module, name, parameter in own:
            module._parameters[name] = parameter
    return {number: p.detach() for number, p in made.items()}


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
