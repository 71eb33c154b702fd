"""A comparison of blocks and their calls: of those that do the same work, tracing one is enough.

Two calls are equal if the blocks consist of the same classes with the same settings and shapes, and if their arguments
have the same shapes. Settings are compared by value where they are plain values, and by identity otherwise: blocks
share their configuration. Whatever cannot be compared, such as hooks, makes a call unlike every other.
Called by ``block_measurement``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...state.capture import AS_STORED
from ..model.blocks import REPLACED
from ..model.side_outputs import DECLARED

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that are compared as they are."""
NOT_COMPARED = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has, of which those that matter are compared by themselves."""
HOOKS = tuple(name for name in NOT_COMPARED if name.endswith("_hooks"))


@dataclass(frozen=True, eq=False)
class Number:
    """A whole number in a block's settings.

    It equals another one if both have the same value, or if each is its own block's place (``layer_idx``). A size that
    equals the place in two blocks is mistaken for it; then only a prediction is wrong.
    """

    value: int
    is_index: bool

    def __eq__(self, other: object) -> bool:
        both = isinstance(other, Number)
        return both and (self.value == other.value or (self.is_index and other.is_index))


def call_form(module: nn.Module, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return what the calls of equal blocks have in common; None if the call is unlike every other.

    ``index`` is the block's place among the blocks. The block must not be compiled, or have a forward of its own
    besides its class's.
    """
    if DECLARED in kwargs or any(getattr(m, h) for m in module.modules() for h in HOOKS):
        return None
    parts = [  # ``Patch`` replaces attributes of the block itself
        (name, _module_form(part, index, () if name else REPLACED))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    first = {id(leaf): place for place, leaf in reversed([*enumerate(leaves)])}
    return parts, spec, [(first[id(leaf)], _argument_form(leaf)) for leaf in leaves]


def _module_form(module: nn.Module, index: int, replaced: Collection[str]) -> Any:
    parameters = [
        (name, each.shape, each.dtype, each.requires_grad, getattr(each, AS_STORED, None))
        for name, each in module.named_parameters(recurse=False)
    ]
    buffers = [(name, each.shape, each.dtype) for name, each in module.named_buffers(recurse=False)]
    settings = {
        name: _value(value, index)
        for name, value in vars(module).items()
        if name not in NOT_COMPARED and name not in replaced
    }
    return type(module), module.training, parameters, buffers, settings


def _value(value: Any, index: int) -> Any:
    """Return ``value`` as it is compared: by identity, unless it is plain or a container."""
    if type(value) is int:
        return Number(value, value == index)
    if isinstance(value, PLAIN):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), [_value(each, index) for each in value]
    if type(value) is dict:
        return dict, [(_value(key, index), _value(each, index)) for key, each in value.items()]
    return type(value), id(value)


def _argument_form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else (type(leaf), id(leaf))


@dataclass(frozen=True)
class TracedCall:
    """The result of tracing one call."""

    form: Any
    activation_bytes: int
    output: Callable[[list[Any]], Any]
    """Function of the flattened arguments of an equal call that returns an output for it."""


def output_maker(output: Any, inputs: list[Any]) -> Callable[[list[Any]], Any] | None:
    """Return a function of flattened arguments that returns an output like ``output``, which was made from ``inputs``.

    None if such an output cannot be made, because it is not only tensors and plain values.
    """
    leaves, spec = pytree.tree_flatten(output)
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
        return None
    given = {id(leaf): place for place, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor)}
    makers = [_maker(leaf, given.get(id(leaf))) for leaf in leaves]
    return lambda arguments: pytree.tree_unflatten([make(arguments) for make in makers], spec)


def _maker(leaf: Any, given: int | None) -> Callable[[list[Any]], Any]:
    if given is not None:
        return lambda arguments: arguments[given]
    if not isinstance(leaf, torch.Tensor):
        return lambda _: leaf
    shape, stride, dtype, device = leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return lambda _: torch.empty_strided(shape, stride, dtype=dtype, device=device)
