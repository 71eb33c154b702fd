"""The host optimizer: the user's own ``torch.optim`` class, applied to tensors in host memory or to slices of them.

An update that can be sliced runs in slices at multiples of 4096 elements from a tensor's start. Torch's fused kernels
then give the same bits as on the whole tensor, and a slice's gradient, state and downcast stay in cache. Other
optimizers get whole tensors. The user's optimizer instance is never stepped: its ``param_groups`` are read, and a
private instance of the same class runs on each part, with the state bound to views.

A master whose bits are in three parts (``SplitMaster``) is joined slice by slice, stepped as fp32, and split again. The
parts are views into a state image, in which the high parts of all parameters are the compute copy.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import BadInput
from ..quantities import MiB
from ..state.split_masters import GROUP, SplitArrays, carry_bytes, join, nearest_24_bits, split
from ..state.tensor_entries import STEP
from .declared_state import Slots, master_bits_of
from .joined import member_of
from .kinds import Kind, arguments_of, kind_of
from .mezo import MeZO
from .torch_threads import Lane, limit_torch_threads, one_torch_thread, shared_out

SLICE_ELEMENTS = 256 * 1024
"""The elements of one slice; a multiple of 4096."""

SHARED_SLICE_ELEMENTS = 16 * SLICE_ELEMENTS
"""The elements of one slice where several of torch's threads compute a fused kernel. Such kernels divide a tensor at
cache lines, so the bits are those of one thread. A large slice takes less time in Python, in which only one thread at a
time makes progress, the one that starts the device's work included."""

SPLIT_SLICE_ELEMENTS = 2 * SLICE_ELEMENTS
"""The elements of one slice of a fused kernel on a split master. Several helpers share the slices, one thread each,
because one thread joins and splits a slice."""

HELPER_BYTES = 64 * MiB
"""Temporary bytes of one helper of a fused kernel. Measured: at most 16 per element (AdamW with amsgrad)."""
SLICE_HELPER_BYTES = 16 * MiB
"""Temporary bytes of one helper of another kernel. Measured: at most 51 per element of a slice (AdamW8bit)."""

GRAD_BYTES = MASTER_BYTES = 4
"""Bytes of one element of a gradient, and of a master: fp32."""


@dataclass
class ParameterState:
    """One parameter in host memory during an update: views into the block's buffers, in their own shapes.

    ``copy`` receives the parameter in the compute dtype. ``scalars`` always holds ``step``, the number of updates so
    far. ``order`` is the order of ``copy``'s dims in memory, from slow to fast, if ``copy`` is not contiguous; all else
    is.
    """

    param: torch.Tensor | SplitMaster
    grad: torch.Tensor
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, torch.Tensor]
    copy: torch.Tensor | None
    group: int
    order: tuple[int, ...] | None = None

    def write_copy(self) -> None:
        """Write ``copy``, if there is one, from the parameter as it is."""
        if self.copy is not None:
            self.copy.copy_(copied(self.param))


def copied(param: torch.Tensor | SplitMaster) -> torch.Tensor:
    """Return the tensor that a compute copy is copied from."""
    return param.high if isinstance(param, SplitMaster) else param


@dataclass(frozen=True)
class HyperParameters:
    """The ``param_groups`` by value, as they were when the step began."""

    groups: tuple[dict[str, Any], ...]


@dataclass
class _Worker(threading.local):
    """Private optimizers, one for each group and thread."""

    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)


@dataclass
class _Part:
    """The unit of an update: a flat slice of a parameter, or all of it."""

    param: torch.Tensor | SplitMaster
    grad: torch.Tensor
    tensors: dict[str, torch.Tensor]
    copy: torch.Tensor | None


def refuse_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``BadInput`` if the script waits for a step of ``optimizer``, which is never stepped itself.

    Schedules replace its ``step`` to count, and mark that.
    """
    for each in (optimizer, *getattr(optimizer, "members", ())):
        found = [
            f"a hook (register_step_{when}_hook)"
            for when in ("pre", "post")
            for hook in getattr(each, f"_optimizer_step_{when}_hooks", {}).values()
            if not getattr(hook, "__module__", "").startswith("holdfast.")
        ]
        own = vars(each).get("step")
        if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
            found.append("a step of its own (optimizer.step = ...)")
        if found:
            raise BadInput(
                f"{type(each).__name__} has {found[0]}, which would not be called: its parameters are updated one by"
                " one, apart from it. Leave it out, and do its work between steps."
            )


class HostOptimizer:
    """The user's optimizer, applied to host memory.

    Thread-safe; callers set torch's intra-op threads of their thread to one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Find how each group is updated.

        Raises ``OptimizerNotSupported`` if ``optimizer`` cannot be run out of core, ``BadInput`` if it has hooks.
        """
        refuse_step_hooks(optimizer)
        self._optimizer = optimizer
        self._worker = _Worker()
        self._fused_helpers: Lane | None = None
        self._slice_helpers: Lane | None = None
        self.master_bits = [master_bits_of(group) for group in optimizer.param_groups]
        """The bits of the masters of each group, on which the layout of files depends."""
        groups = self.snapshot().groups
        self._kinds = [kind_of(member_of(optimizer, number), group) for number, group in enumerate(groups)]

    def start_helpers(self, count: int, threads: int) -> None:
        """Have fused kernels computed by ``count`` helpers with ``threads`` torch threads each, until ``close``.

        Slices of other kernels, which might round otherwise with several threads, are shared by as many helpers with
        one thread each. Nothing changes if ``threads`` is 1.
        """
        if threads > 1:
            self._fused_helpers = Lane(count, "holdfast-fused", partial(limit_torch_threads, threads))
            self._slice_helpers = Lane(count * threads, "holdfast-slices", one_torch_thread)

    def close(self) -> None:
        """End the helpers. Called when no update is under way."""
        helpers = self._fused_helpers, self._slice_helpers
        self._fused_helpers = self._slice_helpers = None
        for lane in helpers:
            if lane is not None:
                lane.close()

    @property
    def takes_gradients(self) -> bool:
        """False if the optimizer needs the losses of two forward passes instead."""
        return not isinstance(self._optimizer, MeZO)

    def slots(self, group: int, shape: tuple[int, ...]) -> Slots:
        """Return the state that is kept for a parameter of ``shape`` in ``group``."""
        return self._kinds[group].slots(shape)

    def cuts(self, group: int) -> bool:
        """Return whether the update of a part of a parameter in ``group`` equals that part of its update."""
        return self._kinds[group].cut

    def keeps_order(self, group: int, shape: tuple[int, ...]) -> bool:
        """Return whether elements of a parameter of ``shape`` may be updated in another order than that of its dims."""
        forms = self.slots(group, shape).tensors.values()
        return self.takes_gradients and self.cuts(group) and all(form.shape == shape for form in forms)

    def temporary_bytes(
        self, group: int, elements: int, keep_grad: bool = False, is_split: bool = False
    ) -> int:
        """Return the temporary bytes of an update of a parameter.

        They include a copy of the gradient if ``keep_grad``, and the joined master if ``is_split``. Both are counted as
        0 where the update is sliced.
        """
        kind = self._kinds[group]
        whole = 0 if kind.cut else keep_grad * GRAD_BYTES + is_split * MASTER_BYTES
        return (kind.temporary_bytes + whole) * elements

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the user's optimizer state of ``parameter``, by slot; empty for a fresh optimizer."""
        return {k: v for k, v in self._optimizer.state.get(parameter, {}).items() if v is not None}

    def snapshot(self) -> HyperParameters:
        """Return the hyper-parameters of every group, by value.

        Raises ``BadInput`` if ``master_bits`` has changed, on which the layout of the files depends.
        """
        groups = [*enumerate(self._optimizer.param_groups)]
        for (number, group), held in zip(groups, self.master_bits):
            if (bits := master_bits_of(group)) != held:
                raise BadInput(
                    f"param_groups[{number}]['master_bits'] was set to {bits}, and this run holds masters of {held}"
                    " bits. Set it where the optimizer is made."
                )
        return HyperParameters(tuple(self._by_value(number, group) for number, group in groups))

    def update(
        self,
        state: ParameterState,
        hyper: HyperParameters,
        scale: torch.Tensor | None = None,
        keep_grad: bool = False,
    ) -> None:
        """Do one optimizer step for one parameter, in place.

        Args:
            state: The parameter, its gradient and its state.
            hyper: The hyper-parameters of the step.
            scale: Multiplies the gradient first (clipping).
            keep_grad: Give the optimizer a copy of the gradient, which it may change.
        """
        if state.order is not None:
            self._update_in_order(state, state.order, hyper, scale)
            return
        kind = self._kinds[state.group]
        slots = kind.slots(tuple(state.param.shape))
        first = kind.makes_state and float(state.scalars[STEP]) == 0

        def step(part: _Part) -> dict[str, torch.Tensor]:
            if keep_grad:
                part = replace(part, grad=part.grad.clone())
            if scale is not None:
                part.grad.mul_(scale)
            param = part.param.joined() if isinstance(part.param, SplitMaster) else part.param
            scalars = self._update_part(state, slots, hyper, part, param, first)
            if isinstance(part.param, SplitMaster):
                part.param.set(param)
            if part.copy is not None:
                part.copy.copy_(copied(part.param))
            return scalars

        is_fused = bool(hyper.groups[state.group].get("fused"))
        is_split = isinstance(state.param, SplitMaster)
        helpers = self._fused_helpers if is_fused and not is_split else self._slice_helpers
        if helpers is not None and kind.cut and state.grad.numel() > SLICE_ELEMENTS:
            shared = SPLIT_SLICE_ELEMENTS if is_split else SHARED_SLICE_ELEMENTS
            elements = shared if is_fused else SLICE_ELEMENTS
            (*_, scalars) = shared_out(helpers, step, _parts(state, slots, elements))
        else:
            (*_, scalars) = map(step, _parts(state, slots, SLICE_ELEMENTS if kind.cut else 0))
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
        """Update copies whose elements are in the memory order of the compute copy.

        A fused kernel decides by memory order which elements it computes together, and which at the end one by one.
        """

        def arranged(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.permute(order).contiguous()

        param = state.param
        assert isinstance(param, torch.Tensor)  # only contiguous masters are split
        stepped = arranged(param)
        ordered = replace(
            state,
            param=stepped,
            grad=arranged(state.grad),
            tensors={name: arranged(tensor) for name, tensor in state.tensors.items()},
            copy=None if state.copy is None else state.copy.permute(order),
            order=None,
        )
        self.update(ordered, hyper, scale)
        param.permute(order).copy_(stepped)
        for name, tensor in state.tensors.items():
            tensor.permute(order).copy_(ordered.tensors[name])

    def _update_part(
        self,
        state: ParameterState,
        slots: Slots,
        hyper: HyperParameters,
        part: _Part,
        values: torch.Tensor,
        first: bool,
    ) -> dict[str, torch.Tensor]:
        """Step one part, whose fp32 ``values`` change in place; return the scalars after it."""
        kind, group = self._kinds[state.group], hyper.groups[state.group]
        param = nn.Parameter(values)
        param.grad = part.grad
        if first:  # the optimizer creates its own initial state
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
        private.state, private.param_groups[0]["params"] = defaultdict(dict), []  # the memory may be lent
        for name, view in part.tensors.items():
            if after[name] is not view:  # this optimizer replaces its state instead of changing it
                view.copy_(after[name])
        return {name: after[name] for name in slots.scalars}

    def _private(
        self, index: int, kind: Kind, group: dict[str, Any], param: nn.Parameter
    ) -> torch.optim.Optimizer:
        """Return this thread's optimizer for a group, holding ``param`` alone with the values of ``group``."""
        private = self._worker.optimizers.get(index)
        if private is None:
            private = self._worker.optimizers[index] = kind.of([param], **group)
        private.param_groups[0].update(group, params=[param])
        return private

    def _by_value(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group's hyper-parameters, with torch's fused kernels chosen where the user left the choice open."""
        arguments = arguments_of(type(member_of(self._optimizer, number)))
        values = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name in arguments
        }
        if "fused" in arguments and not (values.get("fused") is False or values.get("foreach")):
            values["fused"] = True
        return values


def _parts(state: ParameterState, slots: Slots, slice_elements: int) -> Iterator[_Part]:
    """Yield the parameter in slices, or as one part if ``slice_elements`` is 0."""
    if not slice_elements:
        yield _Part(state.param, state.grad, state.tensors, state.copy)
        return
    for start, stop in slices(state.grad.numel(), slice_elements):

        def part(tensor: torch.Tensor, every: int = 1, start: int = start, stop: int = stop) -> torch.Tensor:
            return tensor.view(-1)[start // every : -(-stop // every)]

        tensors = {name: part(tensor, slots.tensors[name].every) for name, tensor in state.tensors.items()}
        copy, whole = None if state.copy is None else part(state.copy), state.param
        param = whole.slice(start, stop) if isinstance(whole, SplitMaster) else part(whole)
        yield _Part(param, part(state.grad), tensors, copy)


def slices(elements: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of the slices of a tensor; a single empty range for an empty tensor."""
    for start in range(0, max(1, elements), each):
        yield start, min(start + each, elements)


SLICE = 256 * 1024
"""The elements that are joined or split at once, so that what is computed on the way stays in cache."""


@dataclass(frozen=True, eq=False)
class SplitMaster:
    """One fp32 tensor of ``shape``, contiguous, or a flat slice of one."""

    parts: SplitArrays
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls, shape: tuple[int, ...], high: torch.Tensor, low: torch.Tensor, carry: torch.Tensor
    ) -> SplitMaster:
        """Return the master whose parts are the bytes of three uint8 tensors in host memory."""
        lower = np.uint16 if len(low) == len(high) else np.uint8
        arrays = (high.numpy().view(np.uint16), low.numpy().view(lower), carry.numpy())
        return cls(SplitArrays(*arrays), shape)

    @property
    def elements(self) -> int:
        return len(self.parts.high)

    @property
    def high(self) -> torch.Tensor:
        """The compute copy, in bf16: a view of the memory."""
        return torch.from_numpy(self.parts.high.view(np.int16)).view(torch.bfloat16).view(self.shape)

    def slice(self, start: int, stop: int) -> SplitMaster:
        """Return elements ``start`` to ``stop`` as a flat master. ``start`` must be a multiple of 8."""
        assert start % GROUP == 0
        high, low, carry = self.parts
        packed = carry[start // GROUP : start // GROUP + carry_bytes(stop - start)]
        return SplitMaster(SplitArrays(high[start:stop], low[start:stop], packed), (stop - start,))

    def joined(self) -> torch.Tensor:
        """Return the values in fp32, in memory of their own."""
        values = torch.empty(self.elements, dtype=torch.float32, device="cpu")
        bits = values.numpy().view(np.uint32)
        for start in range(0, self.elements, SLICE):
            stop = min(start + SLICE, self.elements)
            join(self.slice(start, stop).parts, bits[start:stop])
        return values.view(self.shape)

    def set(self, values: torch.Tensor) -> None:
        """Set the values to those of an fp32 tensor in host memory."""
        bits = values.detach().contiguous().view(-1).numpy().view(np.uint32)
        for start in range(0, self.elements, SLICE):
            stop = min(start + SLICE, self.elements)
            split(bits[start:stop], self.slice(start, stop).parts)


def round_to_24_bits(values: torch.Tensor) -> None:
    """Round a contiguous fp32 tensor in host memory, in place, to the nearest values of 24 bits."""
    bits = values.view(-1).numpy().view(np.uint32)
    for start in range(0, len(bits), SLICE):
        bits[start : start + SLICE] = nearest_24_bits(bits[start : start + SLICE])
