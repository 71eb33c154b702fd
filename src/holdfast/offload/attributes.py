"""Attributes: tensors that modules keep of a forward pass, beside what they return.

A block runs twice, and in the vertical order every micro-batch runs through it before any reaches the next. So
a tensor that a block leaves in an attribute brings no gradient from where the model reads it, and one that the
model sets before its blocks may be another micro-batch's when they read it. Both are refused by name. Looking
takes too long for every step: it is done in an engine's first step and in the first of several micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import ModelNotSupported
from .blocks import Blocks

Named = list[tuple[str, nn.Module]]


class Attributes:
    """Looks at the attributes of a model's modules while ``looking``."""

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
        self.looking = False

    def begin(self, micro_batches: int) -> None:
        """A step begins."""
        self.looking = (micro_batches > 1) not in self._done
        self._done.add(micro_batches > 1)
        self._set_by = {}

    @contextmanager
    def between_blocks(self, micro_batch: int, block: int, interleaved: bool) -> Iterator[None]:
        """Around the model's own code before ``block``: refuse a tensor that it sets with a gradient, and one
        that another of the ``interleaved`` micro-batches has set, which blocks to come would read."""
        modules = self._outside if block else self._all
        before = _look(modules)
        yield
        for name, held in _look(modules).items():
            if _same(held, before.get(name)):
                continue
            if any(tensor.requires_grad for tensor, _ in held):
                raise _refused(name, "is set before", "the blocks run apart from the rest of the model")
            if interleaved and self._set_by.setdefault(name, micro_batch) != micro_batch:
                raise _refused(name, "is set by every micro-batch before", "several micro-batches take turns")

    def refuse_gradients(self, block: int) -> None:
        """After a block ran with a graph: refuse a tensor of that graph in an attribute of its modules."""
        for name, held in _look(self._blocks[block]).items():
            if any(tensor.requires_grad for tensor, _ in held):
                raise _refused(
                    name, "keeps a gradient of", "the model reads it apart from the block's backward"
                )


def _refused(name: str, what: str, why: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"attribute {name} {what} a block, and {why}: it would lose its gradient or hold another micro-batch's"
        " value. Pass it to the blocks as an argument and return it from them, or detach what is only looked at."
    )


Held = list[tuple[torch.Tensor, int]]
"""Tensors with their versions."""


def _look(modules: Named) -> dict[str, Held]:
    """The tensors in attributes, by name; not parameters and buffers."""
    found: dict[str, Held] = {}
    for prefix, module in modules:
        for name, value in vars(module).items():
            if isinstance(value, (torch.Tensor, list, tuple, dict)) and name not in _OF_EVERY_MODULE:
                held = list(_tensors(value))
                if held:
                    found[f"{prefix}.{name}" if prefix else name] = held
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
