"""Detection of tensors that modules keep in attributes during a forward pass.

A block runs twice, and in the vertical order every micro-batch runs through a block before any reaches the next. So a
tensor that a block leaves in an attribute brings no gradient from the code that reads it. A tensor that the model sets
before its blocks may be another micro-batch's when they read it. Both are refused by name, at the read and only there.

Searching for such attributes is too slow for every step. It is done in an engine's first step and in its first step of
several micro-batches. Reads of the attributes that were found are watched in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import ModelNotSupported
from .blocks import Blocks

Named = list[tuple[str, nn.Module]]


TAKEN_IN_TURNS = "is set by every micro-batch before", "several micro-batches take turns"
SET_BEFORE = "is set before", "the blocks run apart from the rest of the model"
KEEPS_GRADIENT = "keeps a gradient of", "the model reads it apart from the block's backward"


@dataclass(frozen=True)
class RunningCode:
    """The code of the model that runs for ``micro_batch``: ``block`` itself (``inside``), or the code before it."""

    micro_batch: int
    block: int
    inside: bool


@dataclass(eq=False)
class WatchedTensor:
    """A tensor in an attribute whose reads are watched.

    ``block`` is the block that keeps the tensor, if a block does.
    """

    name: str
    block: int | None = None
    set_by: int | None = None
    """The micro-batch that set the tensor last, where micro-batches take turns."""
    set_before: int | None = None
    """The block before which the model's own code set the tensor."""
    of_code: bool = False
    """True if the tensor requires grad and the model's own code set it."""
    of_block: bool = False
    """True if the tensor requires grad and ``block`` set it."""
    read_elsewhere: bool = False

    def read(self, place: RunningCode, interleaved: bool) -> None:
        """Raise ``ModelNotSupported`` if the value read at ``place`` could differ from that of a plain training loop.

        Code between two blocks runs for the micro-batches in their order. What that code left in an attribute itself,
        even for the micro-batch before, is therefore what it would find in a plain loop.
        """
        if place.inside and place.block == self.block:
            return
        if not place.inside and place.block == (self.set_before if self.block is None else 0):
            return
        self.read_elsewhere = True
        if self.of_block:
            raise _refused(self.name, *KEEPS_GRADIENT)
        if self.of_code:
            raise _refused(self.name, *SET_BEFORE)
        if interleaved and self.set_by not in (None, place.micro_batch):
            raise _refused(self.name, *TAKEN_IN_TURNS)


class AttributeWatch:
    """Searches the attributes of a model's modules while ``looking``, and watches reads of the suspects."""

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        inside = {id(module) for block in blocks.modules for module in block.modules()}
        self._all: Named = list(model.named_modules())
        self._outside: Named = [(name, module) for name, module in self._all if id(module) not in inside]
        self._blocks: list[Named] = [
            [(f"{name}.{inner}" if inner else name, module) for inner, module in block.named_modules()]
            for name, block in zip(blocks.names, blocks.modules, strict=True)
        ]
        self._done: set[bool] = set()
        self._set_by: dict[str, int] = {}
        self._suspects: dict[tuple[int, str], WatchedTensor] = {}
        self._watches: dict[tuple[type, str], _Watch] = {}
        self.looking = self.interleaved = False
        self.rounds_otherwise = False
        """True if a block's run without a graph has other last bits than that with one: other kernels were chosen."""
        self.place: RunningCode | None = None
        """The model code that runs now; None while none runs."""

    @property
    def attending(self) -> bool:
        """Return whether this step needs to know which code of the model runs when."""
        return self.looking or bool(self._suspects)

    def begin(self, micro_batches: int, interleaved: bool) -> None:
        """Begin a step of ``micro_batches`` micro-batches, which take turns at the blocks if ``interleaved``."""
        self.looking = (micro_batches > 1) not in self._done
        self._done.add(micro_batches > 1)
        self._set_by, self.interleaved = {}, interleaved and micro_batches > 1
        for watch in self._watches.values():
            watch.install()

    def end(self) -> None:
        """End the step, also after a failure: restore the modules' classes."""
        for watch in self._watches.values():
            watch.remove()

    @contextmanager
    def before(self, block: int, micro_batch: int) -> Iterator[None]:
        """Watch the model's own code before ``block``, or after the last block, while it runs.

        Makes suspects of the tensors with a gradient that the code sets, and of those that another interleaved
        micro-batch has set too.
        """
        modules = (self._outside if block else self._all) if self.looking else []
        before = _look(modules)
        with self._at(RunningCode(micro_batch, block, False)):
            yield
        for (holder, name), held in _look(modules).items():
            if _same(held, before.get((holder, name))):
                continue
            others = self._set_by.setdefault(f"{holder}.{name}", micro_batch) != micro_batch
            with_gradient = any(tensor.requires_grad for tensor, _ in held)
            if with_gradient or (others and self.interleaved):
                suspect = self._suspect(holder, name)
                suspect.of_code, suspect.set_by, suspect.set_before = with_gradient, micro_batch, block

    @contextmanager
    def inside(self, block: int, micro_batch: int) -> Iterator[None]:
        """Watch a run of ``block``: tensors that it keeps in attributes become suspects."""
        modules = self._blocks[block] if self.looking else []
        before = _look(modules)
        with self._at(RunningCode(micro_batch, block, True)):
            yield
        for (holder, name), held in _look(modules).items():
            if not _same(held, before.get((holder, name))):
                self._suspect(holder, name).block = block

    def find_gradients(self, block: int) -> None:
        """Find tensors of the block's graph in attributes of its modules.

        Called after ``block`` ran with a graph. Raises ``ModelNotSupported`` if other code has read such a tensor
        already.
        """
        for (holder, name), held in _look(self._blocks[block]).items():
            if any(tensor.requires_grad for tensor, _ in held):
                suspect = self._suspect(holder, name)
                suspect.of_block, suspect.block = True, block
                if suspect.read_elsewhere:
                    raise _refused(suspect.name, *KEEPS_GRADIENT)

    def suspect_of(self, module: nn.Module, attribute: str) -> WatchedTensor | None:
        return self._suspects.get((id(module), attribute))

    def _suspect(self, holder: str, name: str) -> WatchedTensor:
        """Return the suspect for attribute ``name`` of module ``holder``, watched from now on."""
        module = next(module for path, module in self._all if path == holder)
        key, kind = (id(module), name), type(module)
        if key not in self._suspects:
            self._suspects[key] = WatchedTensor(f"{holder}.{name}" if holder else name)
            self._watches.setdefault((kind, name), _Watch(self, kind, name)).install()
        return self._suspects[key]

    @contextmanager
    def _at(self, place: RunningCode) -> Iterator[None]:
        self.place = place
        try:
            yield
        finally:
            self.place = None


_ABSENT: Any = object()


class _Watch:
    """Descriptor that stands in a class for one attribute of its instances, and sees reads and writes."""

    def __init__(self, attributes: AttributeWatch, kind: type, name: str) -> None:
        self._attributes, self._kind, self._name = attributes, kind, name
        self._own: Any = _ABSENT
        self._installed = False

    def install(self) -> None:
        if not self._installed:
            self._own = vars(self._kind).get(self._name, _ABSENT)
            setattr(self._kind, self._name, self)
            self._installed = True

    def remove(self) -> None:
        if self._installed:
            delattr(self._kind, self._name)
            if self._own is not _ABSENT:
                setattr(self._kind, self._name, self._own)
            self._installed = False

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is not None and self._name in vars(module):
            suspect, place = self._attributes.suspect_of(module, self._name), self._attributes.place
            if suspect is not None and place is not None:
                suspect.read(place, self._attributes.interleaved)
            return vars(module)[self._name]
        if self._own is not _ABSENT:
            return self._own
        above = next((vars(k) for k in self._kind.__mro__[1:] if self._name in vars(k)), {})
        if self._name not in above:
            raise AttributeError(self._name)  # and Python asks the module's __getattr__
        return above[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value
        suspect, place = self._attributes.suspect_of(module, self._name), self._attributes.place
        if suspect is not None and place is not None and not place.inside:
            suspect.set_by, suspect.set_before = place.micro_batch, place.block

    def __delete__(self, module: Any) -> None:
        if vars(module).pop(self._name, _ABSENT) is _ABSENT:
            raise AttributeError(self._name)


def _refused(name: str, what: str, why: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"attribute {name} {what} a block, and {why}: it would lose its gradient or hold another micro-batch's"
        " value. Pass it to the blocks as an argument and return it from them, or detach what is only looked at."
    )


Held = list[tuple[torch.Tensor, int]]
"""Tensors with their version counters."""


def _look(modules: Named) -> dict[tuple[str, str], Held]:
    """Return the tensors in attributes of ``modules``, by (module name, attribute); without parameters and buffers."""
    found: dict[tuple[str, str], Held] = {}
    for prefix, module in modules:
        for name, value in vars(module).items():
            if isinstance(value, (torch.Tensor, list, tuple, dict)) and name not in _OF_EVERY_MODULE:
                held = list(_tensors(value))
                if held:
                    found[prefix, name] = held
    return found


def _tensors(value: Any, depth: int = 3) -> Iterator[tuple[torch.Tensor, int]]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield value, 0 if value.is_inference() else value._version
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth - 1)


def _same(one: Held, other: Held | None) -> bool:
    return other is not None and [(id(t), v) for t, v in one] == [(id(t), v) for t, v in other]


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
