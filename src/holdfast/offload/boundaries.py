"""Boundaries: what a block was called with, what it returned, and the way back for gradients.

A block's inputs are a pytree. Float tensors that require grad *move*: they are detached for the block, kept
(on the host or on the SSD) for its recomputation, and their gradients go back to whatever made them. All
else is kept by reference, once. An input that changes while the block runs is refused by name, since the
recomputation would see other values.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from ..errors import BlockInputChanged
from .microbatches import BlockCall


class Delivery:
    """The output of one block for one micro-batch, on its way to the model's thread.

    ``device`` and ``host`` are its float tensors where they are at present; ``grads`` their gradients as
    they come back. Constants that the block passes through are left in the output as they are.
    """

    def __init__(self, output: Any, constants: set[int], needs_grad: bool) -> None:
        leaves, self._spec = pytree.tree_flatten(output)
        self._positions = moving_positions(leaves, constants)
        self.device: list[torch.Tensor] | None = [leaves[p].detach() for p in self._positions]
        self.host: list[torch.Tensor] | None = None
        self.grads: list[torch.Tensor | None] = [None] * len(self._positions)
        self._rest = [None if i in set(self._positions) else leaf for i, leaf in enumerate(leaves)]
        self._needs_grad = needs_grad
        self._given: list[weakref.ref] = []

    def reply(self) -> Any:
        """The output for the thread: its float tensors are leaves that collect gradients."""
        assert self.device is not None
        leaves = list(self._rest)
        for index, (position, tensor) in enumerate(zip(self._positions, self.device, strict=True)):
            if self._needs_grad:
                tensor = tensor.detach().requires_grad_()
                tensor.register_post_accumulate_grad_hook(self._collector(index))
            leaves[position] = tensor
            self._given.append(weakref.ref(tensor))
        return pytree.tree_unflatten(leaves, self._spec)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Which of the given tensors ``tensor`` is."""
        return next((i for i, ref in enumerate(self._given) if ref() is tensor), None)

    def add_grad(self, index: int, grad: torch.Tensor) -> None:
        held = self.grads[index]
        self.grads[index] = grad if held is None else held + grad

    def backward(self, output: Any, constants: set[int]) -> None:
        """Backward from ``output``, the block's output computed again with a graph. Uses the gradients up."""
        leaves = pytree.tree_leaves(output)
        tensors = [leaves[p] for p in moving_positions(leaves, constants)]
        pairs = [
            (t, g) for t, g in zip(tensors, self.grads, strict=True) if g is not None and t.requires_grad
        ]
        self.grads = []
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _collector(self, index: int):
        def collect(tensor: torch.Tensor) -> None:
            assert tensor.grad is not None
            self.add_grad(index, tensor.grad)
            tensor.grad = None

        return collect


def moving_positions(leaves: list[Any], constants: set[int]) -> list[int]:
    """Positions of the float tensors in a flattened output that are not among the block's constants."""
    return [i for i, leaf in enumerate(leaves) if _is_float(leaf) and id(leaf) not in constants]


@dataclass
class Source:
    """Where the gradient of a moving input goes: to an earlier block's output, or to a point of the thread's
    own graph (the prologue, or code between blocks)."""

    delivery: Delivery | None = None
    index: int = 0
    edge: GradientEdge | None = None
    grad: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        if self.delivery is not None:
            self.delivery.add_grad(self.index, grad)
        else:
            self.grad = grad if self.grad is None else self.grad + grad


@dataclass
class Boundary:
    """One call of one block by one micro-batch.

    ``kept`` is the flattened input with holes where an input moves; ``moving`` says, by position, where
    its gradient goes. ``device`` and ``host`` are the moving inputs where they are at present.
    """

    block: int
    spec: pytree.TreeSpec
    kept: list[Any]
    names: list[str]
    moving: dict[int, Source] = field(default_factory=dict)
    device: list[torch.Tensor] | None = None
    host: list[torch.Tensor] | None = None
    shapes: list[tuple[torch.dtype, torch.Size]] = field(default_factory=list)
    roots: list[Source] = field(default_factory=list)
    """Points of the thread's own graph that were first seen here."""

    def inputs(self) -> tuple[tuple, dict[str, Any], list[torch.Tensor]]:
        """The block's arguments with fresh leaves in place of the moving inputs, and those leaves."""
        assert self.device is not None
        leaves = [tensor.detach().requires_grad_() for tensor in self.device]
        flat = list(self.kept)
        for position, leaf in zip(self.moving, leaves, strict=True):
            flat[position] = leaf
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return args, kwargs, leaves

    @property
    def constants(self) -> set[int]:
        """Identities of the tensors that do not move."""
        return {id(leaf) for leaf in self.kept if isinstance(leaf, torch.Tensor)}

    def send_back(self, leaves: list[torch.Tensor]) -> None:
        """Pass the gradients of ``leaves`` on to their sources, and on through the thread's own graph where
        nothing more can arrive: at the boundary that saw a point first."""
        for source, leaf in zip(self.moving.values(), leaves, strict=True):
            if leaf.grad is not None:
                source.add(leaf.grad)
        roots = [source for source in self.roots if source.grad is not None]
        if roots:
            edges = [source.edge for source in roots if source.edge is not None]
            torch.autograd.backward(edges, [s.grad for s in roots], retain_graph=self.block > 0)  # type: ignore[arg-type]
        self.roots.clear()


class Tracker:
    """Knows, for one micro-batch, where every tensor that reaches a block came from."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._thread_sources: dict[GradientEdge, Source] = {}

    def delivered(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)

    def boundary(self, call: BlockCall) -> Boundary:
        """Describe ``call``; its moving inputs are on the device."""
        flat, spec = pytree.tree_flatten_with_path((call.args, call.kwargs))
        boundary = Boundary(call.block, spec, [leaf for _, leaf in flat], [_name(path) for path, _ in flat])
        boundary.device = []
        for position, (_, leaf) in enumerate(flat):
            if _is_float(leaf) and leaf.requires_grad:
                boundary.moving[position] = self._source(leaf, boundary)
                boundary.device.append(leaf.detach())
                boundary.kept[position] = None
        return boundary

    def _source(self, tensor: torch.Tensor, boundary: Boundary) -> Source:
        for delivery in reversed(self._deliveries):
            index = delivery.index_of(tensor)
            if index is not None:
                return Source(delivery, index)
        edge = get_gradient_edge(tensor)
        source = self._thread_sources.get(edge)
        if source is None:
            source = self._thread_sources[edge] = Source(edge=edge)
            boundary.roots.append(source)
        return source


def refuse_changes(before: list[Any], leaves: list[Any], names: list[str], block: str) -> None:
    """Raise ``BlockInputChanged`` for the first input whose fingerprint differs from ``before``."""
    for name, old, leaf in zip(names, before, leaves, strict=True):
        if fingerprint(leaf) != old:
            raise BlockInputChanged(
                f"{block} changed its input {name} ({type(leaf).__name__}) while it ran. Out-of-core training "
                "runs a block twice, so its inputs must stay as they are: make the block return a new value."
            )


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def fingerprint(value: Any, depth: int = 3) -> Any:
    """Something cheap that differs if ``value`` was changed in place."""
    if isinstance(value, torch.Tensor):
        version = 0 if value.is_inference() else value._version
        return (id(value), version, tuple(value.shape))
    if isinstance(value, _PLAIN):
        return value
    if depth == 0 or callable(value):
        return id(value)
    if isinstance(value, (list, tuple)):
        return [fingerprint(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return [(str(key), fingerprint(item, depth - 1)) for key, item in value.items()]
    return (id(value), fingerprint(vars(value), depth - 1)) if hasattr(value, "__dict__") else id(value)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _name(path: tuple) -> str:
    """A readable name of a place in (args, kwargs)."""
    first, rest = path[0], path[1:]
    if getattr(first, "idx", None) == 1 and rest:
        return f"{getattr(rest[0], 'key', rest[0])}{pytree.keystr(rest[1:])}"
    return f"argument {pytree.keystr(rest)}"
