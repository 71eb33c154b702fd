"""The parameters and buffers that the names of a model lead to, compared from step to step.

A script may set modules anew: a pooling layer in ``forward``, a metric after each step. What a run holds follows names,
so only a name that leads to another parameter object counts, and a persistent buffer that came or went. A buffer whose
module was replaced is looked up in the new module from then on. Called by ``LiveState``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from .capture import BufferPlace, wraps
from .layout.regions import is_distributed

MODULES_EACH_STEP = 2000
"""The number of modules that are compared at every step; of n times as many, each n-th step compares all."""


@dataclass(frozen=True)
class Changes:
    """The parameters and buffers that names did not lead to before. True if the state has to be scanned again."""

    replaced: tuple[str, ...] = ()
    """Names of parameters that are other objects."""
    moved: tuple[str, ...] = ()
    """Names of parameters that came or went."""
    has_other_buffers: bool = False
    """True if a persistent buffer came or went."""

    def __bool__(self) -> bool:
        return bool(self.replaced or self.moved or self.has_other_buffers)


class ModulePlaces:
    """The places of the parameters and buffers of ``roots``, modules by the prefix of their names.

    A look compares flat lists of all objects. Only where these differ, names are compared.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self.changes = Changes()
        """The result of the last look."""
        self._walk()
        self._first_parameters, self._first_buffers = self._parameters, self._persistent
        self._steps_until_look = self._interval

    @property
    def _interval(self) -> int:
        return max(1, len(self._holders) // 3 // MODULES_EACH_STEP)

    def look(self, at_once: bool) -> bool:
        """Compare with what was there first, and return whether ``changes`` and ``buffers`` were made anew.

        Sharded parameters are left out, since FSDP2 puts the whole ones in their place at times. In a model of n times
        2,000 modules only each n-th call compares, unless ``at_once``: what was replaced is then seen that much later.
        """
        self._steps_until_look -= 1
        if self._steps_until_look > 0 and not at_once:
            return False
        self._steps_until_look = self._interval
        if self._are_same():
            return False
        self._walk()
        first, now = self._first_parameters, self._parameters
        both = [name for name in first if name in now]
        self.changes = Changes(
            tuple(
                name
                for name in both
                if now[name] is not first[name]
                and not is_distributed(now[name])
                and not is_distributed(first[name])
            ),
            tuple(sorted(first.keys() ^ now.keys())),
            self._persistent != self._first_buffers,
        )
        return True

    def _are_same(self) -> bool:
        found = map(dict.get, self._there, self._names)
        return (
            all(map(is_, found, self._things))
            and list(map(len, self._holders)) == self._sizes
            and all(_persistent(module) == names for module, names in self._with_buffers)
        )

    def _walk(self) -> None:
        """Note what is there now."""
        modules = self._named_modules()
        self._holders: list[dict[str, Any]] = [
            holder
            for _, module in modules
            for holder in (module._parameters, module._modules, module._buffers)
        ]
        """The parameters, submodules and buffers of each module."""
        self._sizes = list(map(len, self._holders))
        items = [
            (holder, name, thing)
            for _, module in modules
            for holder in (module._parameters, module._modules)
            for name, thing in holder.items()
            if thing is None or isinstance(thing, nn.Module) or not is_distributed(thing)
        ]
        self._there, self._names, self._things = (
            (list(column) for column in zip(*items, strict=True)) if items else ([], [], [])
        )
        """Holder, name and object, of each parameter and submodule."""
        self._with_buffers = [(module, _persistent(module)) for _, module in modules if module._buffers]
        self._parameters = {
            path + name: each
            for path, module in modules
            for name, each in module._parameters.items()
            if each is not None
        }
        self.buffers: dict[str, BufferPlace] = {}
        """The place of each buffer by name, also where it is None or not persistent; of several stages the first."""
        for path, module in modules:
            for name in module._buffers:
                self.buffers.setdefault(path + name, (module, name))
        self._persistent = {path + name for path, module in modules for name in _persistent(module)}

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        """Return each module once, in the model's order, with what the names of its tensors begin with."""
        found: dict[nn.Module, str] = {}
        for prefix, root in self._roots.items():
            left = [(f"{prefix}:" if prefix else "", root)]
            while left:
                path, module = left.pop()
                if module in found:
                    continue
                found[module] = path
                inner = [(name, each) for name, each in module._modules.items() if each is not None]
                left += [
                    (path if wraps(module, name) else f"{path}{name}.", each)
                    for name, each in reversed(inner)
                ]
        return [(path, module) for module, path in found.items()]


def _persistent(module: nn.Module) -> list[str]:
    """Return the names of the persistent buffers that ``module`` has now."""
    hidden = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if buffer is not None and name not in hidden]
