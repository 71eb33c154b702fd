"""The boundaries of blocks: the inputs of a call, its output, and the way back for gradients.

A block's inputs are a pytree. Float (and complex) tensors that require grad *move*: they are detached for the block and
kept (on the host or on the SSD) for its recomputation, unless its graph is kept. Their gradients go back to the code
that made them. All other inputs are kept by reference, once. Two inputs are refused by name: an object in which a
tensor with a gradient hides, and an input that changes while the block runs or before it runs again, because the
recomputation would see other values (``input_changes``).

Where several blocks contribute to a gradient, the sum follows the order of an ordinary backward. The gradient so far
goes into the next block's backward as a root; it is not added to the result.

The model's own code between two blocks is a segment of the thread's graph. A backward pass through a segment ends at
tensors that an earlier segment made (features of an image that are added between layers). Their gradients wait until
the backward pass of that segment, so each segment's graph is passed once.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import _pytree as pytree

from ...errors import BlockInputChanged, ModelNotSupported
from ..memory.transfer_pool import PackedForm
from .input_changes import fingerprint, hidden_gradient
from .microbatches import Autocast, BlockCall

SAMPLES = 1024
"""The elements of an output that two runs of a block are compared by."""
REPEATED = 2e-2, 1e-3
"""Accepted difference of the two, as a part of the largest element: in 16 bits and in fp32. Kernels may differ."""
Seed = tuple[GradientEdge, torch.Tensor]
"""A point of the graph where an input begins, and the gradient that the input has before the backward pass."""


COLLECTING = "holdfast collecting"
"""Key in the metadata of a node at which a graph of the thread begins."""


class BlockOutput:
    """The output of one block for one micro-batch, on its way to the model's thread.

    ``device`` and ``host`` are its float tensors where they are at present. ``grads`` are their gradients as they come
    back. Constants that the block passes through stay in the output as they are.
    """

    def __init__(self, output: Any, constants: set[int], needs_grad: bool) -> None:
        leaves, self._spec = pytree.tree_flatten(output)
        self._positions = moving_positions(leaves, constants)
        self.device: list[torch.Tensor] | None = [leaves[p].detach() for p in self._positions]
        self.host: list[torch.Tensor] | None = None
        self.grads: list[torch.Tensor | None] = [None] * len(self._positions)
        self._rest = [None if i in self._positions else leaf for i, leaf in enumerate(leaves)]
        self._needs_grad = needs_grad
        self._given: list[weakref.ref] = []

    def reply(self) -> Any:
        """Return the output for the model's thread; its float tensors collect their gradients."""
        assert self.device is not None
        leaves = list(self._rest)
        for index, (position, tensor) in enumerate(zip(self._positions, self.device, strict=True)):
            if self._needs_grad:
                tensor = collecting(tensor, partial(self.add_grad, index))
            leaves[position] = tensor
            self._given.append(weakref.ref(tensor))
        return pytree.tree_unflatten(leaves, self._spec)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of ``tensor`` among the float tensors that ``reply`` returned; None if it is none of
        them."""
        return next((i for i, ref in enumerate(self._given) if ref() is tensor), None)

    def add_grad(self, index: int, grad: torch.Tensor) -> None:
        held = self.grads[index]
        self.grads[index] = grad if held is None else held + grad

    def backward(self, graph: Graph, seeds: list[Seed]) -> None:
        """Run the backward pass through ``graph``, which computed the output, and use the gradients up.

        ``seeds`` are inputs of the block that have a gradient already, with that gradient.
        """
        found = zip(graph.roots, self.grads, strict=True)
        pairs = [(root, grad) for root, grad in found if root is not None and grad is not None] + seeds
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        self.device, self.grads = None, []


@dataclass
class Graph:
    """The part of the autograd graph that one computation of a block made."""

    roots: list[GradientEdge | None]
    """Edges at which the gradients of the block's float outputs arrive, in the order of ``BlockOutput.grads``."""
    leaves: list[torch.Tensor]
    """The moving inputs at which the graph begins."""

    @classmethod
    def of(cls, output: Any, constants: set[int], leaves: list[torch.Tensor]) -> Graph:
        """Return the graph of ``output``, without keeping the tensors themselves."""
        flat = pytree.tree_leaves(output)
        tensors = [flat[position] for position in moving_positions(flat, constants)]
        return cls([get_gradient_edge(t) if t.requires_grad else None for t in tensors], leaves)


def collecting(tensor: torch.Tensor, collect: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return a tensor that shares the memory of ``tensor`` and begins a graph.

    A backward pass that arrives there calls ``collect`` with the gradient unchanged. (A leaf would first bring the
    gradient into the tensor's own layout.)
    """
    begin = tensor.detach().requires_grad_()
    begin = begin.view_as(begin)

    def take(grads: tuple[torch.Tensor | None, ...]) -> tuple[None]:
        if grads[0] is not None:
            collect(grads[0])
        return (None,)

    assert begin.grad_fn is not None
    begin.grad_fn.metadata[COLLECTING] = True  # type: ignore[index]
    begin.grad_fn.register_prehook(take)  # type: ignore[arg-type]
    return begin


def moving_positions(leaves: list[Any], constants: set[int]) -> list[int]:
    """Return the positions of the float tensors in a flattened output that are not among the block's constants."""
    return [i for i, leaf in enumerate(leaves) if _is_float(leaf) and id(leaf) not in constants]


class TensorOrigin:
    """The destination of a moving input's gradient.

    It is an earlier block's output, or a point of the thread's own graph (the prologue, or code between blocks).
    """

    def __init__(
        self,
        delivery: BlockOutput | None = None,
        index: int = 0,
        edge: GradientEdge | None = None,
        running: threading.Event | None = None,
    ) -> None:
        self.delivery, self.index, self.edge, self.running = delivery, index, edge, running
        self._grad: torch.Tensor | None = None
        self._hook = None if edge is None else edge.node.register_prehook(_collector_at(weakref.ref(self)))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that has come back so far."""
        return self._grad if self.delivery is None else self.delivery.grads[self.index]

    @grad.setter
    def grad(self, grad: torch.Tensor) -> None:
        if self.delivery is None:
            self._grad = grad
        else:
            self.delivery.grads[self.index] = grad

    def open(self) -> None:
        """Let the backward pass go through this point, which collected the arriving gradients until now."""
        if self._hook is not None:
            self._hook.remove()

    def close(self) -> None:
        """Release the graph and the gradient; nothing more may arrive."""
        self.edge = self._grad = None


def _collector_at(source_ref: weakref.ref[TensorOrigin]):
    """Return a hook for a node of the thread's graph.

    A backward pass that arrives from elsewhere (the epilogue, code between later blocks) leaves its gradient with the
    source, and ends there.
    """

    def collect(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        source = source_ref()
        if source is None or source.edge is None or source.running is None or not source.running.is_set():
            return None  # the source is gone, or the backward pass is another micro-batch's
        arrived = grads[source.edge.output_nr]
        if arrived is None:
            return None
        source.grad = arrived if source.grad is None else source.grad + arrived
        return tuple(None if i == source.edge.output_nr else grad for i, grad in enumerate(grads))

    return collect


@dataclass
class Boundary:
    """One call of one block by one micro-batch.

    ``kept`` is the flattened input with holes where an input moves. ``moving`` maps the position of a moving input to
    the destination of its gradient. ``repeated`` maps each position at which a moving input comes again to its first
    position. ``device`` and ``host`` are the moving inputs where they are at present.
    """

    block: int
    spec: pytree.TreeSpec
    kept: list[Any]
    autocast: Autocast
    moving: dict[int, TensorOrigin] = field(default_factory=dict)
    repeated: dict[int, int] = field(default_factory=dict)
    device: list[torch.Tensor] | None = None
    host: list[torch.Tensor] | None = None
    forms: list[PackedForm] = field(default_factory=list)
    roots: list[TensorOrigin] = field(default_factory=list)
    """Points of the thread's own graph that were first seen at this boundary."""
    grads: list[torch.Tensor | None] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    """Fingerprints, at the block's first run, of what is kept by reference."""
    graph: Graph | None = None
    """The graph of the block's forward pass, where that is not computed again."""
    samples: list[torch.Tensor] = field(default_factory=list)
    """Elements of the output of the block's first run, where the second is compared with it."""

    def inputs(self) -> tuple[tuple, dict[str, Any], list[torch.Tensor]]:
        """Return the block's arguments with new tensors in place of the moving inputs, and those tensors.

        If a graph is recorded, it begins at these tensors, and their gradients arrive in ``grads``.
        """
        assert self.device is not None
        grads: list[torch.Tensor | None] = [None] * len(self.device)
        self.grads = grads
        if torch.is_grad_enabled():
            leaves = [collecting(t, partial(grads.__setitem__, i)) for i, t in enumerate(self.device)]
        else:
            leaves = [tensor.detach().requires_grad_() for tensor in self.device]
        flat = list(self.kept)
        for position, leaf in zip(self.moving, leaves, strict=True):
            flat[position] = leaf
        for position, first in self.repeated.items():
            flat[position] = flat[first]
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return args, kwargs, leaves

    def remember(self) -> None:
        """Remember what is kept by reference, at the block's first run; it must not change from then on."""
        self.seen = [fingerprint(leaf) for leaf in self.kept]

    def refuse_changes(self, block: str) -> None:
        """Raise ``BlockInputChanged``, naming the input that differs from what the first run saw.

        Called before the recomputation.
        """
        for position, (before, leaf) in enumerate(zip(self.seen, self.kept, strict=True)):
            if fingerprint(leaf) != before:
                raise BlockInputChanged(
                    f"{self._name(position)} of {block} was changed after the block ran and before it ran again."
                    " Out-of-core training runs a block twice and keeps what has no gradient by reference: give"
                    " every block a value of its own."
                )

    def rounds_otherwise(self, output: Any, block: str) -> bool:
        """Return whether ``output``, of the block's second run, has other bits than that of the first.

        Raises ``ModelNotSupported`` if it differs by more than kernels may.
        """
        found = samples_of(output)
        for before, after in zip(self.samples, found, strict=False):
            bound = before.abs().max() * REPEATED[before.dtype == torch.float32]
            if before.shape != after.shape or bool(((before - after).abs() > bound).any()):
                raise ModelNotSupported(
                    f"{block} has another output when it runs again on the same input, so its gradients would be wrong."
                    " A block runs twice, with the same numbers from the default generators of torch, NumPy and Python:"
                    " leave generators and counters of its own out, or give Placement(recomputed_fraction=0.0), with"
                    " which it runs once."
                )
        return not all(map(torch.equal, self.samples, found))

    def _name(self, position: int) -> str:
        """Return the name of the input at ``position``, as the model passed it to the block."""
        numbered = pytree.tree_unflatten(list(range(len(self.kept))), self.spec)
        paths, _ = pytree.tree_flatten_with_path(numbered)
        (_, first, *rest) = next(path for path, number in paths if number == position)
        positional = isinstance(first, pytree.SequenceKey)
        name = f"argument [{first.idx}]" if positional else str(getattr(first, "key", first))
        return f"input {name}{pytree.keystr(tuple(rest))}"

    @property
    def constants(self) -> set[int]:
        """Identities of the input tensors that do not move."""
        return {id(leaf) for leaf in self.kept if isinstance(leaf, torch.Tensor)}

    def seeds(self, leaves: list[torch.Tensor]) -> list[Seed]:
        """Return the ``leaves`` that have a gradient from later blocks already, each with that gradient."""
        pairs = zip(leaves, self.moving.values(), strict=True)
        return [(get_gradient_edge(leaf), source.grad) for leaf, source in pairs if source.grad is not None]

    def send_back(self) -> None:
        """Pass the gradients of the inputs to their sources.

        Where nothing more can arrive, pass them on through the thread's own graph: that is at the boundary that saw a
        point first.
        """
        for source, grad in zip(self.moving.values(), self.grads, strict=True):
            if grad is not None:
                source.grad = grad
        for source in self.roots:
            source.open()
        roots = [(s.edge, s.grad) for s in self.roots if s.edge is not None and s.grad is not None]
        if roots:
            edges, grads = zip(*roots, strict=True)
            torch.autograd.backward(edges, grads, retain_graph=self.block > 0)
        for source in self.roots:
            source.close()
        self.roots.clear()


class OriginTracker:
    """Finds, for one micro-batch, the origin of every tensor that reaches a block."""

    def __init__(self) -> None:
        self._deliveries: list[BlockOutput] = []
        self._thread_sources: dict[GradientEdge, TensorOrigin] = {}
        self._sequences: list[int] = []
        """The thread's next sequence number of autograd at each call of a block."""
        self._roots: list[list[TensorOrigin]] = []
        """The roots of each call's boundary."""
        self.running = threading.Event()
        """Event that is set while a backward pass of this micro-batch runs."""

    def delivered(self, delivery: BlockOutput) -> None:
        self._deliveries.append(delivery)

    def boundary(self, call: BlockCall, name: str) -> Boundary:
        """Return the boundary for ``call`` of the block ``name``, with its moving inputs on the device.

        Raises ``ModelNotSupported`` for a hook on the gradient of an input, which would not be called, and for a tensor
        with a gradient hidden in an object.
        """
        flat, spec = pytree.tree_flatten((call.args, call.kwargs))
        boundary = Boundary(call.block, spec, list(flat), call.autocast)
        self._roots.append(boundary.roots)
        boundary.device = []
        first: dict[int, int] = {}
        for position, leaf in enumerate(flat):
            if not (_is_float(leaf) and leaf.requires_grad):
                continue
            if leaf._backward_hooks:
                raise ModelNotSupported(
                    f"an input of {name}, shape {tuple(leaf.shape)}, has a hook on its gradient, which would not be"
                    " called. Register it inside the block, on a tensor that the block computes."
                )
            boundary.kept[position] = None
            if id(leaf) in first:
                boundary.repeated[position] = first[id(leaf)]
                continue
            first[id(leaf)] = position
            boundary.moving[position] = self._source(leaf)
            boundary.device.append(leaf.detach())
        refuse_hidden(boundary.kept, name, "input")
        self._sequences.append(call.sequence)
        return boundary

    def end_at_earlier(self, loss: torch.Tensor) -> None:
        """Let the backward pass of ``loss`` end at what was made before the last block."""
        if loss.grad_fn is not None:
            self._end_at_earlier(loss.grad_fn)

    def _source(self, tensor: torch.Tensor) -> TensorOrigin:
        for delivery in reversed(self._deliveries):
            index = delivery.index_of(tensor)
            if index is not None:
                return TensorOrigin(delivery, index)
        edge = get_gradient_edge(tensor)
        source = self._thread_sources.get(edge)
        if source is None:
            source = self._begin_at(edge)
            if self._segment(edge.node) == len(self._sequences):
                self._end_at_earlier(edge.node)
        return source

    def _begin_at(self, edge: GradientEdge) -> TensorOrigin:
        """Return a source at ``edge``, whose gradient goes on in the backward pass of the segment that made it."""
        source = self._thread_sources[edge] = TensorOrigin(edge=edge, running=self.running)
        self._roots[min(self._segment(edge.node), len(self._roots) - 1)].append(source)
        return source

    def _segment(self, node: Node) -> int:
        """Return the number of blocks that were called before ``node`` was made.

        A parameter has a node that belongs to the present segment.
        """
        return bisect_right(self._sequences, node._sequence_nr())

    def _end_at_earlier(self, node: Node) -> None:
        """Begin sources at the nodes of earlier segments that lead to ``node``, which the present one made."""
        seen, left = {node}, [node]
        while left:
            for before, number in left.pop().next_functions:
                if before is None or before in seen or COLLECTING in before.metadata:  # type: ignore[operator]
                    continue
                if self._segment(before) == len(self._sequences):
                    seen.add(before)
                    left.append(before)
                elif (edge := GradientEdge(before, number)) not in self._thread_sources:
                    self._begin_at(edge)


def samples_of(output: Any) -> list[torch.Tensor]:
    """Return some elements of each real tensor in a block's output, spread evenly."""
    real = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    flat = [tensor.detach().reshape(-1) for tensor in real if tensor.numel()]
    return [values[:: -(-len(values) // SAMPLES)].clone() for values in flat]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def refuse_hidden(leaves: list[Any], block: str, role: str) -> None:
    """Raise ``ModelNotSupported`` if a tensor that requires grad hides in an object among ``leaves``.

    ``leaves`` are the flattened inputs or output of ``block``. The gradient of such a tensor would be lost.
    """
    for leaf in leaves:
        where = None if isinstance(leaf, torch.Tensor) else hidden_gradient(leaf, type(leaf).__name__)
        if where is not None:
            raise ModelNotSupported(
                f"{where} in the {role} of {block} is a tensor with a gradient inside an object. Gradients flow"
                " between blocks through tensors, tuples, lists, dicts and dataclasses registered with"
                " torch.utils._pytree alone: pass the tensor itself."
            )
