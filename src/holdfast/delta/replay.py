"""Replay: records applied to the live model and optimizers, each as the step it was.

Each optimizer runs its own ``step``, without hooks, on the gradients that training consumed, with the hyper-parameters
of that step. What the run held after a step is compared with a fingerprint; where it differs replay stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from holdfast import failpoints

from ..errors import HoldfastError
from ..state.capture import CapturedParameter
from ..state.cuts import is_distributed, local_of
from ..state.encoding import decode
from ..state.live import BUFFERS, LiveState
from ..state.plain import flat_bytes
from ..state.progress import load_hyper_parameters
from . import codecs
from .closures import closure_again
from .drawing import draw_again
from .slots import tensors_of
from .tap import CONSUMED, scale

SAMPLED_BYTES = 64
"""Of each parameter in a fingerprint."""


Strides = Mapping[str, Sequence[int]]
"""Of parameters that are not contiguous, by name."""


def fingerprint(parameters: Sequence[CapturedParameter], step: int, strides: Strides | None = None) -> str:
    """The xxh3_64 of some bytes of what this process holds of each parameter, others at each ``step``; as they lie in
    memory here, or as where parameters had these ``strides``."""
    return hashed(sampled(parameters, step, strides))


def hashed(samples: torch.Tensor) -> str:
    """The fingerprint, from what ``sampled`` gave."""
    return xxhash.xxh3_64_hexdigest(samples.cpu().numpy().data) if samples.numel() else ""


def sampled(
    parameters: Sequence[CapturedParameter], step: int, strides: Strides | None = None
) -> torch.Tensor:
    """The bytes that a fingerprint is made of, where the parameters are."""
    samples = []
    for position, parameter in enumerate(parameters):
        held = local_of(parameter.parameter.detach())
        flat = _bytes_of(held if strides is None else _laid(held, strides.get(parameter.name)))
        places = max(1, flat.numel() // SAMPLED_BYTES)
        start = (step * 2654435761 + position * 40503) % places * SAMPLED_BYTES
        samples.append(flat[start : start + SAMPLED_BYTES])
    return torch.cat(samples) if samples else torch.empty(0, dtype=torch.uint8)


def _laid(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Contiguous, with the elements of ``tensor`` in the order in which one of ``strides`` (None: a contiguous one)
    would have them in memory, if that has no gaps."""
    if strides is not None and _is_dense(torch.empty_strided(tensor.shape, strides, device="meta")):
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return tensor.contiguous()


def _bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    """All bytes of a parameter, in the order in which they lie in memory."""
    tensor = parameter
    if not tensor.is_contiguous():
        tensor = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.contiguous()
    return flat_bytes(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


class OtherCut(HoldfastError):
    """A record is of another parallelism than the state that it is applied to."""


@dataclass
class Taken:
    """What is taken of a record: ``about`` is its JSON. Parameters named in ``skipped`` are left as they are: what was
    loaded of them is of a later step, or other records have them. ``held`` are those that its rank stores (None: all),
    and ``spreads`` by update what is used again for the next record."""

    about: dict[str, Any]
    parts: Sequence[memoryview]
    skipped: Collection[str] = ()
    held: Collection[str] | None = None
    spreads: dict[int, codecs.Spreads] = field(default_factory=dict)


def apply(state: LiveState, records: Sequence[Taken], after_update: Callable[[], None] | None = None) -> None:
    """Do the step that ``records`` tell of, each with its part of the gradients; the first tells of the rest. It may
    write over the memory of their parts."""
    first = records[0]
    about = first.about
    for number, update in enumerate(about["updates"]):
        optimizer = state.optimizers[update["optimizer"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_name = {state.name_of[id(p)]: p for p in parameters}
        grads: dict[str, torch.Tensor] = {}
        for record in records:
            grads |= _gradients(record, number, by_name)
        load_hyper_parameters(optimizer.param_groups, update["groups"])
        if state.own and "own" in update:
            state.own[update["optimizer"]].apply(state, update["own"])
        draw_again(update.get("drawn"))
        with closing(state.rounds(optimizer, grads.keys())) as rounds:
            for names in rounds:
                some = {name: grads[name] for name in names if name in grads}
                _step(state, optimizer, some, update)
    failpoints.reach("in_replay")
    buffers = {}
    if about["buffers"] is not None and BUFFERS not in first.skipped:
        buffers = tensors_of(first.parts[about["buffers"]])
    if after_update is not None and about["updates"]:
        # others, such as a count of averages, it finds as the last step left them
        own = state.buffers(beside=False).keys()
        state.load({key: buffer for key, buffer in buffers.items() if key in own})
        draw_again(about["updates"][-1].get("drawn_after"))
        after_update()
    state.load(buffers)  # they were recorded after it


@torch.no_grad()
def clip_as_told(record: dict[str, Any], parts: list[memoryview]) -> None:
    """Multiply the gradients by what the trainer's were multiplied by: then they are as consumed."""
    for update in record["updates"]:
        if "coefficient" in update:
            grads = tensors_of(parts[update["part"]], "/grad")
            used = [grad for name, grad in grads.items() if name not in update["without"]]
            scale(used, decode(update.pop("coefficient")))


def _gradients(record: Taken, number: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By parameter, those that update ``number`` consumed, as far as they are taken from this record."""
    update = record.about["updates"][number]
    stored = {name: p for name, p in parameters.items() if record.held is None or name in record.held}
    spreads = record.spreads.setdefault(number, {})
    grads = codecs.decode(update, record.parts[update["part"]], stored, spreads)
    return {name: grad for name, grad in grads.items() if name not in record.skipped}


def _step(
    state: LiveState,
    optimizer: torch.optim.Optimizer,
    grads: dict[str, torch.Tensor],
    update: dict[str, Any],
) -> None:
    consumed, (args, kwargs, *loss) = update["consumed"], update.get("arguments", ((), {}))
    if loss:  # the step was given a closure that had been called
        kwargs = {**kwargs, "closure": closure_again(loss[0])}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    there = [p.device for p in parameters if state.name_of[id(p)] in grads] or [p.device for p in parameters]
    device = there[0] if there else None  # of a rank that stored nothing
    keeps_none = type(optimizer).__module__.startswith("torch.optim.")  # of the gradients' memory
    try:
        for parameter in parameters:
            grad = grads.get(state.name_of[id(parameter)])
            parameter.grad = None if grad is None else _like(parameter, grad, keeps_none)
        for name in CONSUMED:
            if name in consumed:
                setattr(optimizer, name, torch.tensor(consumed[name], device=device))
        with torch.no_grad():
            _unhooked_step(optimizer, *args, **kwargs)
    finally:
        for name in CONSUMED:
            if name in consumed:
                delattr(optimizer, name)
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def _like(parameter: torch.Tensor, grad: torch.Tensor, may_be_itself: bool) -> torch.Tensor:
    """``grad`` lying in memory as ``parameter`` does, distributed as it is."""
    held = local_of(parameter.detach())
    if held.shape != grad.shape:
        raise OtherCut(f"a gradient of {tuple(grad.shape)} is not for {tuple(held.shape)}")
    alike = grad.device == held.device and grad.stride() == held.stride()
    if may_be_itself and alike and not is_distributed(parameter):
        return grad
    made = torch.empty_like(parameter.detach())
    local_of(made).copy_(grad)
    return made


def _unhooked_step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """The optimizer's own ``step``, without the hooks around it."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer, *args, **kwargs)
