"""Changes: what a block must leave as it is while it runs, since it runs twice.

Tensors are compared by identity and version, containers and objects by what they hold: cheap enough to do at
every block call, and sure to see an in-place operation, a replaced item and a longer list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import BlockInputChanged


class Watch:
    """What a block must leave as it is while it runs: its inputs, and its buffers."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], holders: list[tuple[str, nn.Module]]) -> None:
        self._inputs, self._holders = (args, kwargs), holders
        self._before = self._look()

    def refuse_changes(self, block: str) -> None:
        """Raise ``BlockInputChanged`` naming the first thing that is not as it was."""
        after = self._look()
        if after == self._before:
            return
        before, nothing = self._before, object()
        names = [*after, *before]
        changed = (name for name in names if after.get(name, nothing) != before.get(name, nothing))
        raise BlockInputChanged(
            f"{block} changed its {next(changed)} while it ran. Out-of-core training runs a block"
            " twice, so what it is given and its buffers must stay as they are: make the block return a new"
            " value."
        )

    def _look(self) -> dict[str, Any]:
        leaves, _ = pytree.tree_flatten_with_path(self._inputs)
        seen = {f"input {_name(path)}": fingerprint(leaf) for path, leaf in leaves}
        for prefix, module in self._holders:
            for name, buffer in module._buffers.items():
                seen[f"buffer {prefix}.{name}".replace(" .", " ")] = fingerprint(buffer)
        return seen


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_DEPTH = 6


class _Same:
    """A thing compared by identity. It is held, so that nothing else gets its place meanwhile."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Something cheap that differs if ``value`` was changed in place."""
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
        return [(str(key), fingerprint(item, depth - 1)) for key, item in value.items()]
    return (_Same(value), fingerprint(vars(value), depth - 1)) if hasattr(value, "__dict__") else _Same(value)


def _name(path: tuple) -> str:
    """A readable name of a place in (args, kwargs)."""
    first, rest = path[0], path[1:]
    if getattr(first, "idx", None) == 1 and rest:
        return f"{getattr(rest[0], 'key', rest[0])}{pytree.keystr(rest[1:])}"
    return f"argument {pytree.keystr(rest)}"
