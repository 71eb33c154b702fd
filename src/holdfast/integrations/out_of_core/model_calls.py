"""Calls of the model that a script's loop has not made yet, known from its first call and the batches to come.

Only tensors of the batches themselves are recognised, by their identity. So what the loop calls later can be compared
without reading a value: either the tensors are the same objects, unchanged, or the call is another. Called by the steps
and evaluations of loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import BadInput

PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
"""Types of arguments that are compared by value."""


class ModelCall:
    """A call of the model, with the versions that its tensors have now."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._versions = self._versions_now()

    def run(self, model: Callable[..., Any]) -> Any:
        """Return what ``model`` returns for this call."""
        return model(*self._args, **self._kwargs)

    def is_called(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether a call with these arguments is this one."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return spec == self._spec and all(map(_is_same, leaves, self._leaves))

    @property
    def has_changed(self) -> bool:
        """True if a tensor was changed in place since."""
        return self._versions_now() != self._versions

    @property
    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the keywords, by name."""
        return {name: each for name, each in self._kwargs.items() if isinstance(each, torch.Tensor)}

    def _versions_now(self) -> list[int]:
        return [leaf._version for leaf in self._leaves if isinstance(leaf, torch.Tensor)]


class CallPattern:
    """The arguments of a call of the model, as places in the batch that they come from."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], batch: Any) -> None:
        """Find the arguments in ``batch``. Raises ``BadInput`` for a tensor that is not one of the batch's own."""
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        places = {id(leaf): place for place, leaf in pytree.tree_flatten_with_path(_plain(batch))[0]}
        self._leaves = [(places.get(id(leaf)) if _is_data(leaf) else None, leaf) for leaf in leaves]
        self._is_batch = [leaf is batch for leaf in leaves]
        for (place, leaf), is_batch in zip(self._leaves, self._is_batch, strict=True):
            if place is None and not is_batch and isinstance(leaf, torch.Tensor):
                raise BadInput(
                    f"the model was called with a tensor of shape {list(leaf.shape)} that is not in the loader's batch."
                    " The engine computes the micro-batches of a step together, before the loop comes to them, so it"
                    " has to find their arguments in the batches: make them in the dataset or in collate_fn."
                )

    @property
    def uses_batch(self) -> bool:
        """True if an argument comes from the batch."""
        return any(self._is_batch) or any(place is not None for place, _ in self._leaves)

    def of(self, batch: Any) -> ModelCall:
        """Return the same call with ``batch``. Raises ``BadInput`` if it lacks an argument."""
        plain = _plain(batch)
        try:
            made = [
                batch if whole else leaf if place is None else pytree.key_get(plain, place)
                for whole, (place, leaf) in zip(self._is_batch, self._leaves, strict=True)
            ]
        except (KeyError, IndexError) as error:
            raise BadInput(f"the batches of one step differ: one of them has no {error}") from error
        return ModelCall(*pytree.tree_unflatten(made, self._spec))


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of ``batch`` by name; none if it has no names."""
    named = batch if isinstance(batch, Mapping) else {}
    return {str(name): value for name, value in named.items() if isinstance(value, torch.Tensor)}


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of all modules of ``model`` by name, on which a forward pass may depend.

    Such are modes, the adapters that are switched on, and their scales. Containers count if all in them is plain.
    """
    return {
        f"{path}.{name}".lstrip("."): plain
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if (plain := _plain_setting(value)) is not _NO_SETTING
    }


def changed_setting(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return the name of an attribute that differs; None if all are the same."""
    if before == now:
        return None
    return next(
        name for name in {**before, **now} if before.get(name, _NO_SETTING) != now.get(name, _NO_SETTING)
    )


def _plain_setting(value: Any) -> Any:
    """Return an attribute as a value that later changes do not reach."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        is_plain = all(isinstance(each, PLAIN) for each in value.values())
        return dict(value) if is_plain else _NO_SETTING
    if isinstance(value, (list, tuple, set)):
        is_plain = all(isinstance(each, PLAIN) for each in value)
        return (frozenset if isinstance(value, set) else tuple)(value) if is_plain else _NO_SETTING
    return _NO_SETTING


_NO_SETTING = object()


def _is_data(leaf: Any) -> bool:
    """Return whether ``leaf`` may differ from one batch to the next, and is found by its identity."""
    return not isinstance(leaf, PLAIN)


def _plain(batch: Any) -> Any:
    """Return ``batch``; one with names as a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)
