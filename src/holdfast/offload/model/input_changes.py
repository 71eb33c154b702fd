"""Detection of changes that a block makes to its inputs or buffers while it runs.

A block runs twice, so it must leave both as they are. Tensors are compared by identity and version, containers and
objects by their contents. That is cheap enough for every block call, and it detects an in-place operation, a replaced
item and a longer list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import BlockInputChanged


class InputWatch:
    """Fingerprints of the inputs and the buffers that a block must not change while it runs."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], holders: list[tuple[str, nn.Module]]) -> None:
        self._args, self._kwargs, self._holders = args, kwargs, holders
        self._before = self._look()

    def refuse_changes(self, block: str) -> None:
        """Raise ``BlockInputChanged``, naming the first input or buffer that changed."""
        if self._look() == self._before:
            return
        before, after = self._named(self._before), self._named(self._look())
        name = next(name for name in {**after, **before} if after.get(name) != before.get(name))
        where = _place(before.get(name), after.get(name))
        raise BlockInputChanged(
            f"{block} changed its {name}{where} while it ran. Out-of-core training runs a block"
            " twice, so what it is given and its buffers must stay as they are: make the block return a new"
            " value."
        )

    def _look(self) -> tuple[list[Any], dict[str, Any], list[dict[str, Any]]]:
        """Return the fingerprints of the arguments, by name of the keyword arguments, and by holder of the buffers."""
        return (
            [fingerprint(value) for value in self._args],
            {name: fingerprint(value) for name, value in self._kwargs.items()},
            [
                {name: fingerprint(buffer) for name, buffer in module._buffers.items()}
                for _, module in self._holders
            ],
        )

    def _named(self, seen: tuple[list[Any], dict[str, Any], list[dict[str, Any]]]) -> dict[str, Any]:
        """Return the fingerprints ``seen`` by the names that an error shows."""
        args, kwargs, buffers = seen
        named = {f"input argument [{index}]": found for index, found in enumerate(args)}
        named |= {f"input {name}": found for name, found in kwargs.items()}
        for (prefix, _), held in zip(self._holders, buffers, strict=True):
            named |= {
                f"buffer {prefix}.{name}" if prefix else f"buffer {name}": x for name, x in held.items()
            }
        return named


def _place(before: Any, after: Any) -> str:
    """Return the index of the first difference between two fingerprints of a container, as it would be written."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return ""
    key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
    return f"[{key!r}]{_place(before.get(key), after.get(key))}"


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_DEPTH = 6


class _Same:
    """A value compared by identity. It keeps the value alive, so that no other object gets the same ``id``."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Return a cheap value that differs after ``value`` was changed in place."""
    if isinstance(value, torch.Tensor):
        version = 0 if value.is_inference() else value._version
        return (_Same(value), version, tuple(value.shape))
    if isinstance(value, _PLAIN):
        return value
    if depth == 0 or callable(value):
        return _Same(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [fingerprint(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {str(key): fingerprint(item, depth - 1) for key, item in value.items()}
    return (_Same(value), fingerprint(_attributes(value), depth - 1))


def hidden_gradient(value: Any, where: str, depth: int = _DEPTH) -> str | None:
    """Return the path of a tensor that requires grad and is hidden in ``value``; None if there is none.

    ``value`` is not a container that PyTorch looks into. Modules and parameters keep their gradients themselves.
    """
    if isinstance(value, torch.Tensor):
        return where if value.requires_grad and not isinstance(value, nn.Parameter) else None
    if depth == 0 or isinstance(value, (*_PLAIN, nn.Module, type)):
        return None
    if isinstance(value, dict):
        parts = [(f"{where}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
    else:
        parts = [(f"{where}.{name}", item) for name, item in _attributes(value).items()]
    found = (hidden_gradient(item, place, depth - 1) for place, item in parts)
    return next((place for place in found if place is not None), None)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its dict and its slots."""
    held = {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name in _slots(kind)
        if hasattr(value, name)
    }
    return held | getattr(value, "__dict__", {})


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))
