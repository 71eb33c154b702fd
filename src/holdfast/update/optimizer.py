"""The host optimizer: the user's own ``torch.optim`` class, applied to slices of tensors in host memory.

An update is cut into tiles at multiples of 4096 elements from a tensor's start, which keeps torch's fused
kernels bit-identical to a call on the whole tensor, and a tile's gradient, state and downcast stay in cache.
The optimizer instance of the user is never stepped: its ``param_groups`` are read, and a private instance
of the same class runs on each tile with the state bound to views.

Only elementwise optimizers can be cut: a list of known classes, and a self-test that a sliced update equals
the whole one bit for bit.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import OptimizerNotSupported

TILE_ELEMENTS = 256 * 1024
"""Elements of one tile; a multiple of 4096."""

ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of ``torch.optim`` whose update of an element depends on that element alone."""

STEP = "step"
"""The scalar slot that counts updates; kept for every trained parameter, whether the optimizer has it or not."""

IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable", "maximize"}
"""Of a parameter group: how the update is computed here, which is not carried over."""


@dataclass(frozen=True)
class Slots:
    """What an optimizer keeps for one parameter: tensors of its shape, and scalars."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]


@dataclass
class ParameterState:
    """One parameter in host memory during an update: flat fp32 views into the block's buffers.

    ``copy`` receives the parameter in the compute dtype. ``scalars`` always holds ``step``: updates so far.
    """

    param: torch.Tensor
    grad: torch.Tensor
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, torch.Tensor]
    copy: torch.Tensor | None
    group: int


@dataclass(frozen=True)
class HyperParameters:
    """The ``param_groups`` by value, as they were when the step began."""

    groups: tuple[dict[str, Any], ...]


@dataclass
class _Worker(threading.local):
    """One private optimizer per group and thread."""

    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is known to update every element by itself."""
    kind = type(optimizer)
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim")


def kept_slots(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int
) -> frozenset[str] | None:
    """What an optimizer of this class holds for a parameter of ``dims`` dimensions in ``group``, seen by stepping
    another one. None where that is not tried, as of classes that are not torch's own, or does not work."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return None
    arguments = set(inspect.signature(kind.__init__).parameters) - IMPLEMENTATION
    parameter = nn.Parameter(torch.ones([2] * dims, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    try:
        private = kind([parameter], **{name: value for name, value in group.items() if name in arguments})
        private.step()
    except Exception:  # of any kind: it says nothing of what is to be known
        return None
    return frozenset(slot for slot, value in private.state[parameter].items() if value is not None)


class HostOptimizer:
    """Applies the user's optimizer to slices. Thread-safe; callers set torch's intra-op threads to one in
    their own thread."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ``OptimizerNotSupported`` if ``optimizer`` cannot be cut."""
        self._optimizer = optimizer
        self._class = type(optimizer)
        if not is_elementwise(optimizer):
            raise OptimizerNotSupported(
                f"{self._class.__name__} is not known to be elementwise: its update of a slice may differ from the "
                f"slice of its update. Elementwise ones are {', '.join(ELEMENTWISE)} of torch.optim."
            )
        self._arguments = set(inspect.signature(self._class.__init__).parameters) - {"self", "params"}
        self._worker = _Worker()
        self.slots = tuple(self._discover(group) for group in self.snapshot().groups)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What the user's optimizer holds for ``parameter`` already, by slot; empty for a fresh one."""
        return {k: v for k, v in self._optimizer.state.get(parameter, {}).items() if v is not None}

    def snapshot(self) -> HyperParameters:
        """The hyper-parameters of every group, by value."""
        return HyperParameters(tuple(self._by_value(group) for group in self._optimizer.param_groups))

    def update(
        self,
        state: ParameterState,
        hyper: HyperParameters,
        scale: torch.Tensor | None = None,
        keep_grad: bool = False,
    ) -> None:
        """One optimizer step of one parameter, in place. ``scale`` multiplies the gradient first (clipping). An
        optimizer may change the gradient it is given; with ``keep_grad`` it gets a copy."""
        first = float(state.scalars[STEP]) == 0
        scalars: dict[str, torch.Tensor] = {}
        for start, stop in tiles(state.param.numel()):
            grad = state.grad[start:stop].clone() if keep_grad else state.grad[start:stop]
            if scale is not None:
                grad.mul_(scale)
            scalars = self._update_tile(state, hyper, slice(start, stop), grad, first)
            if state.copy is not None:
                state.copy[start:stop].copy_(state.param[start:stop])
        for name, value in scalars.items():
            state.scalars[name].copy_(value)
        if STEP not in scalars:
            state.scalars[STEP].add_(1)

    def _update_tile(
        self, state: ParameterState, hyper: HyperParameters, tile: slice, grad: torch.Tensor, first: bool
    ) -> dict[str, torch.Tensor]:
        """Step one tile; returns the scalars after it."""
        group, slots = hyper.groups[state.group], self.slots[state.group]
        param = nn.Parameter(state.param[tile])
        param.grad = grad
        if first:  # the optimizer makes its own initial state
            private = self._class([param], **group)
            private.step()
            made = private.state[param]
            for name in slots.tensors:
                state.tensors[name][tile].copy_(made[name])
            return {name: made[name] for name in slots.scalars if name in made}
        private = self._private(state.group, group, param)
        bound = {name: state.tensors[name][tile] for name in slots.tensors}
        scalars = {name: state.scalars[name].clone() for name in slots.scalars}
        private.state = defaultdict(dict, {param: {**bound, **scalars}})
        private.step()
        after = private.state[param]
        for name, view in bound.items():
            if after[name] is not view:  # an optimizer that replaces its state instead of changing it
                view.copy_(after[name])
        return {name: after[name] for name in slots.scalars}

    def _private(self, index: int, group: dict[str, Any], param: nn.Parameter) -> torch.optim.Optimizer:
        """This thread's optimizer for a group, holding ``param`` alone with the values of ``group``."""
        private = self._worker.optimizers.get(index)
        if private is None:
            private = self._worker.optimizers[index] = self._class([param], **group)
        private.param_groups[0].update(group, params=[param])
        return private

    def _by_value(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group's hyper-parameters, with torch's fused kernels chosen where the user left the choice open."""
        values = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name in self._arguments
        }
        if "fused" in self._arguments and not (values.get("fused") is False or values.get("foreach")):
            values["fused"] = True
        return values

    def _discover(self, group: dict[str, Any]) -> Slots:
        """Learn the slots by stepping a small parameter, and check that slices equal the whole."""
        whole = self._trial(group, [slice(0, 10_000)])
        sliced = self._trial(group, [slice(0, 4096), slice(4096, 10_000)])
        for name, value in whole.items():
            if not torch.equal(value, sliced[name]):
                raise OptimizerNotSupported(
                    f"{self._class.__name__} with {group} gives other bits in {name!r} on slices of a tensor than on "
                    "the whole, so it cannot be run out of core. Use another optimizer or other options."
                )
        state = {name: value for name, value in whole.items() if name != "param"}
        odd = [name for name, value in state.items() if value.numel() not in (1, 10_000)]
        if odd:
            raise OptimizerNotSupported(
                f"{self._class.__name__} keeps {odd}, neither a scalar nor one value per element."
            )
        return Slots(
            tuple(name for name, value in state.items() if value.dim() and value.numel() > 1),
            tuple(name for name, value in state.items() if not value.dim() or value.numel() == 1),
        )

    def _trial(self, group: dict[str, Any], slices: list[slice]) -> dict[str, torch.Tensor]:
        """Parameters and state after three steps from fixed values, computed slice by slice."""
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(10_000, generator=generator)
        grads = [torch.randn(10_000, generator=generator) for _ in range(3)]
        results: list[dict[str, torch.Tensor]] = []
        for part in slices:
            param = nn.Parameter(start[part].clone())
            private = self._class([param], **group)
            for grad in grads:
                param.grad = grad[part].clone()
                private.step()
            state = {k: v for k, v in private.state[param].items() if isinstance(v, torch.Tensor)}
            results.append({"param": param.detach(), **state})
        return {
            name: torch.cat([r[name] for r in results]) if value.dim() else value
            for name, value in results[0].items()
        }


def tiles(elements: int) -> Iterator[tuple[int, int]]:
    """The half-open ranges into which a tensor of ``elements`` is cut."""
    for start in range(0, elements, TILE_ELEMENTS):
        yield start, min(start + TILE_ELEMENTS, elements)
