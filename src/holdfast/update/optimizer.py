"""The host optimizer: the user's own ``torch.optim`` class, applied to tensors in host memory, or to slices of them.

Where an update can be cut, it is, into tiles at multiples of 4096 elements from a tensor's start, which keeps torch's
fused kernels bit-identical to a call on the whole tensor, and a tile's gradient, state and downcast stay in cache.
Optimizers that need a whole tensor get it. The optimizer instance of the user is never stepped: its ``param_groups``
are read, and a private instance of the same class runs on each part with the state bound to views.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..state.atoms import STEP
from .forms import Slots
from .joined import member_of
from .kinds import Kind, arguments_of, kind_of
from .mezo import MeZO

TILE_ELEMENTS = 256 * 1024
"""Elements of one tile; a multiple of 4096."""

GRAD_BYTES = 4
"""Of an element of a gradient: fp32."""


@dataclass
class ParameterState:
    """One parameter in host memory during an update: views into the block's buffers, in their own shapes.

    ``copy`` receives the parameter in the compute dtype. ``scalars`` always holds ``step``: updates so far. ``order``
    is that of the dims in memory, from slow to fast, where ``copy`` is not contiguous and all else is.
    """

    param: torch.Tensor
    grad: torch.Tensor
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, torch.Tensor]
    copy: torch.Tensor | None
    group: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class HyperParameters:
    """The ``param_groups`` by value, as they were when the step began."""

    groups: tuple[dict[str, Any], ...]


@dataclass
class _Worker(threading.local):
    """One private optimizer per group and thread."""

    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)


@dataclass
class _Part:
    """What is updated at once: a tile of a parameter, flat, or all of it."""

    param: torch.Tensor
    grad: torch.Tensor
    tensors: dict[str, torch.Tensor]
    copy: torch.Tensor | None


class HostOptimizer:
    """Applies the user's optimizer. Thread-safe; callers set torch's intra-op threads to one in their own thread."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ``OptimizerNotSupported`` if ``optimizer`` cannot be run out of core."""
        self._optimizer = optimizer
        self._worker = _Worker()
        groups = self.snapshot().groups
        self._kinds = [kind_of(member_of(optimizer, number), group) for number, group in enumerate(groups)]

    @property
    def takes_gradients(self) -> bool:
        """False of one that needs the losses of two forward passes instead."""
        return not isinstance(self._optimizer, MeZO)

    def slots(self, group: int, shape: tuple[int, ...]) -> Slots:
        """What is kept for a parameter of ``shape`` in ``group``."""
        return self._kinds[group].slots(shape)

    def cuts(self, group: int) -> bool:
        """Whether the update of a part of a parameter in ``group`` is that part of its update."""
        return self._kinds[group].cut

    def keeps_order(self, group: int, shape: tuple[int, ...]) -> bool:
        """Return whether elements of a parameter of ``shape`` may be updated in another order than that of its dims."""
        forms = self.slots(group, shape).tensors.values()
        return self.takes_gradients and self.cuts(group) and all(form.shape == shape for form in forms)

    def temporary_bytes(self, group: int, elements: int, keep_grad: bool = False) -> int:
        """What an update of a parameter takes besides its state, and a copy of its gradient with ``keep_grad``; next to
        nothing where it is cut."""
        kind = self._kinds[group]
        return (kind.temporary_bytes + (0 if kind.cut or not keep_grad else GRAD_BYTES)) * elements

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What the user's optimizer holds for ``parameter`` already, by slot; empty for a fresh one."""
        return {k: v for k, v in self._optimizer.state.get(parameter, {}).items() if v is not None}

    def snapshot(self) -> HyperParameters:
        """The hyper-parameters of every group, by value."""
        groups = enumerate(self._optimizer.param_groups)
        return HyperParameters(tuple(self._by_value(number, group) for number, group in groups))

    def update(
        self,
        state: ParameterState,
        hyper: HyperParameters,
        scale: torch.Tensor | None = None,
        keep_grad: bool = False,
    ) -> None:
        """One optimizer step of one parameter, in place. ``scale`` multiplies the gradient first (clipping). An
        optimizer may change the gradient it is given; with ``keep_grad`` it gets a copy."""
        if state.order is not None:
            self._update_in_order(state, state.order, hyper, scale)
            return
        kind = self._kinds[state.group]
        slots = kind.slots(tuple(state.param.shape))
        first = kind.makes_state and float(state.scalars[STEP]) == 0
        scalars: dict[str, torch.Tensor] = {}
        for part in _parts(state, slots, kind.cut):
            if keep_grad:
                part = replace(part, grad=part.grad.clone())
            if scale is not None:
                part.grad.mul_(scale)
            scalars = self._update_part(state, slots, hyper, part, first)
            if part.copy is not None:
                part.copy.copy_(part.param)
        for name, value in scalars.items():
            state.scalars[name].copy_(value)
        if STEP not in scalars:
            state.scalars[STEP].add_(1)

    def _update_in_order(
        self,
        state: ParameterState,
        order: tuple[int, ...],
        hyper: HyperParameters,
        scale: torch.Tensor | None,
    ) -> None:
        """Update copies whose elements lie in the order that the parameter's have in memory: by that a fused kernel
        decides which of them it computes together, and which, at the end, one by one."""

        def arranged(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.permute(order).contiguous()

        ordered = replace(
            state,
            param=arranged(state.param),
            grad=arranged(state.grad),
            tensors={name: arranged(tensor) for name, tensor in state.tensors.items()},
            copy=None if state.copy is None else state.copy.permute(order),
            order=None,
        )
        self.update(ordered, hyper, scale)
        state.param.permute(order).copy_(ordered.param)
        for name, tensor in state.tensors.items():
            tensor.permute(order).copy_(ordered.tensors[name])

    def _update_part(
        self, state: ParameterState, slots: Slots, hyper: HyperParameters, part: _Part, first: bool
    ) -> dict[str, torch.Tensor]:
        """Step one part; returns the scalars after it."""
        kind, group = self._kinds[state.group], hyper.groups[state.group]
        param = nn.Parameter(part.param)
        param.grad = part.grad
        if first:  # the optimizer makes its own initial state
            private = kind.of([param], **group)
            private.step()
            made = private.state[param]
            for name, view in part.tensors.items():
                view.copy_(made[name])
            return {name: made[name] for name in slots.scalars if name in made}
        private = self._private(state.group, kind, group, param)
        scalars = {name: state.scalars[name].clone() for name in slots.scalars}
        private.state = defaultdict(dict, {param: {**part.tensors, **scalars}})
        private.step()
        after = private.state[param]
        for name, view in part.tensors.items():
            if after[name] is not view:  # an optimizer that replaces its state instead of changing it
                view.copy_(after[name])
        return {name: after[name] for name in slots.scalars}

    def _private(
        self, index: int, kind: Kind, group: dict[str, Any], param: nn.Parameter
    ) -> torch.optim.Optimizer:
        """This thread's optimizer for a group, holding ``param`` alone with the values of ``group``."""
        private = self._worker.optimizers.get(index)
        if private is None:
            private = self._worker.optimizers[index] = kind.of([param], **group)
        private.param_groups[0].update(group, params=[param])
        return private

    def _by_value(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """A group's hyper-parameters, with torch's fused kernels chosen where the user left the choice open."""
        arguments = arguments_of(type(member_of(self._optimizer, number)))
        values = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name in arguments
        }
        if "fused" in arguments and not (values.get("fused") is False or values.get("foreach")):
            values["fused"] = True
        return values


def _parts(state: ParameterState, slots: Slots, cut: bool) -> Iterator[_Part]:
    """The parameter in tiles, if it may be ``cut``."""
    if not cut:
        yield _Part(state.param, state.grad, state.tensors, state.copy)
        return
    for start, stop in tiles(state.param.numel()):

        def tile(tensor: torch.Tensor, every: int = 1, start: int = start, stop: int = stop) -> torch.Tensor:
            return tensor.view(-1)[start // every : -(-stop // every)]

        tensors = {name: tile(tensor, slots.tensors[name].every) for name, tensor in state.tensors.items()}
        copy = None if state.copy is None else tile(state.copy)
        yield _Part(tile(state.param), tile(state.grad), tensors, copy)


def tiles(elements: int) -> Iterator[tuple[int, int]]:
    """The half-open ranges into which a tensor of ``elements`` is cut; an empty one, of one without any."""
    for start in range(0, max(1, elements), TILE_ELEMENTS):
        yield start, min(start + TILE_ELEMENTS, elements)
