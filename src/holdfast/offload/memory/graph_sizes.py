"""The bytes that a block's graph holds from its forward to its backward pass, read from the graph of a real step.

Autograd's nodes list the tensors that they have saved. Reading the list runs no code of the model, unpacks nothing and
changes no bit of the step. Not counted is what a block takes from outside (parameters, buffers and inputs) and what a
hook on saved tensors has put elsewhere. Called on the thread that computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..model.absent_parameters import AS_TENSORS
from ..model.boundaries import Boundary, Graph
from ..model.microbatches import casts

SAVED = "_raw_saved_"
"""Prefix of the attributes of a node that hold what it has saved, without unpacking it."""

NOT_MEASURABLE = 1 << 50
"""Number that stands for the bytes of a graph that cannot be measured; it is more than fits anywhere."""


@dataclass(frozen=True)
class GraphSizes:
    """The largest sizes of some micro-batches, in bytes."""

    input_bytes: int
    """Bytes of the float tensors that flow into a block."""
    activation_bytes: tuple[int, ...]
    """Bytes that the graph of each block holds; 0 for the last, which is never kept."""

    def __or__(self, other: GraphSizes) -> GraphSizes:
        """Return the larger size of each kind."""
        pairs = zip(self.activation_bytes, other.activation_bytes, strict=True)
        return GraphSizes(max(self.input_bytes, other.input_bytes), tuple(max(pair) for pair in pairs))


class GraphGauge:
    """Measures what the graphs of some ``micro_batches`` of one step hold."""

    def __init__(self, micro_batches: Iterable[int], blocks: int) -> None:
        self._graphs: dict[int, list[int | None]] = {m: [None] * (blocks - 1) for m in micro_batches}
        self._inputs: dict[int, int] = dict.fromkeys(self._graphs, 0)

    def note(self, micro_batch: int, boundary: Boundary, graph: Graph, module: nn.Module) -> None:
        """Measure ``graph``, which ``module`` has just computed from the inputs of ``boundary``."""
        held = self._graphs.get(micro_batch)
        if held is None or casts(boundary.autocast):  # then the graph would not be kept
            return
        inputs = [*pytree.tree_leaves(boundary.kept), *graph.leaves]
        outside = [*module.parameters(), *module.buffers(), *inputs]
        nodes = [root.node for root in graph.roots if root is not None]
        try:
            with AS_TENSORS():  # experts may be absent
                places = {_place(t) for t in outside if isinstance(t, torch.Tensor)}
            held[boundary.block] = held_bytes(nodes, places)
        except RuntimeError:  # of tensors without a storage, such as sparse ones
            held[boundary.block] = NOT_MEASURABLE
        moving = sum(tensor.nbytes for tensor in graph.leaves)
        self._inputs[micro_batch] = max(self._inputs[micro_batch], moving)

    def sizes(self) -> GraphSizes | None:
        """Return the largest sizes; None unless every block has run for every micro-batch."""
        found: GraphSizes | None = None
        for m, graphs in self._graphs.items():
            if None in graphs:
                return None
            mine = GraphSizes(self._inputs[m], (*(count or 0 for count in graphs), 0))
            found = mine if found is None else found | mine
        return found


def held_bytes(nodes: Iterable[Any], outside: set[int]) -> int:
    """Return the bytes of the storages that a graph holds, except for those ``outside``.

    ``nodes`` are those at which the gradients of the graph's outputs arrive.
    """
    found: dict[int, int] = {}
    waiting, seen = [*nodes], {*nodes}
    while waiting:
        node = waiting.pop()
        for tensor in _saved(node):
            found[_place(tensor)] = tensor.untyped_storage().nbytes()
        further = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= further
        waiting += further
    return sum(nbytes for place, nbytes in found.items() if place not in outside)


def _place(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common if they share memory."""
    return tensor.untyped_storage()._cdata


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node of a graph has saved, and those that a function in Python keeps in attributes."""
    for name in _names(type(node)):
        held = getattr(node, name)
        for saved in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(saved.data, torch.Tensor):
                yield saved.data
    for tensor in pytree.tree_leaves(list(getattr(node, "__dict__", {}).values())):
        if isinstance(tensor, torch.Tensor):
            yield tensor


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(SAVED))
