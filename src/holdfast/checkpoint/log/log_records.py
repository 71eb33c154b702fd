"""Log records: the making of one from a completed step, and its replay into a live model and its optimizers.

A record is immutable and builds on the one before it: it has the buffers that have changed, and the new end of a text
that grew. In a replay each optimizer runs its own ``step``, without hooks, on the gradients that training consumed,
with the hyper-parameters of that step. After each step the state is compared with a fingerprint, of the bytes that the
builder sampled; replay stops where they differ. Records are built for ``DurabilityBackend``. They are replayed by
``lineage``, and by a replica's server for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from holdfast import failpoints

from ...accelerators import devices_of, is_accelerator
from ...errors import BadInput
from ...state.capture import CapturedParameter
from ...state.encoding import decode, shorten
from ...state.layout.regions import is_distributed, local_of
from ...state.live_state import BUFFERS, LiveState
from ...state.plain_tensors import flat_bytes
from ...state.progress import draw_again, load_hyper_parameters
from ..arithmetic import arithmetic_here, autocast_as
from ..capture.closures import closure_again
from ..capture.optimizer_hooks import CONSUMED, Update, scale
from ..capture.staging_buffers import AsyncHostCopy, tensors_of
from ..capture.state_digests import digest, digest_of
from ..compression import codecs
from ..compression.codecs import ShardingMismatch
from ..snapshot.snapshot_image import image_of
from .recorder import FinalizedStep

FOLLOWS = "follows"
"""The key of the digest of the state that a record follows, in records after a snapshot that the script asked for."""
ARITHMETIC = "arithmetic"
"""The key of the digests of the writer's arithmetic, in the first record that a process writes in a timeline."""
SAMPLES = ""
"""The key, beside those of buffers, of the bytes from which the fingerprint is made."""


class RecordBuilder:
    """The builder of one run's records.

    Buffers are recorded when they differ from the last recorded value. With ``shortens``, so are long texts of the
    script: of a text that grew only the addition is recorded.
    """

    def __init__(self, state: LiveState, shortens: bool = False) -> None:
        self._digests: dict[str, str] = {}
        self._views = FlatViews()
        self._shortens = shortens
        self._progress: dict[str, Any] | None = None
        """The progress of the record before, with full texts; None if the next record must not depend on it."""
        self._forgotten, self._is_first = False, True
        self._follows: tuple[int, str] | None = None
        """A step, and the digest of the state that the record after it follows; None if records lead there."""
        self._kinds = {key: (atom.dtype, atom.shape) for key, (atom, _) in state.buffers().items()}

    def forget(self) -> None:
        """Make the next record independent of earlier ones, because it follows a snapshot."""
        self._forgotten = True

    def follow(self, state: LiveState, step: int) -> None:
        """Have the record after ``step`` say what state it follows, because records may lead to another one.

        That is so where the script changed the state after the last step, and only a snapshot holds the change. A
        replay from an earlier snapshot then ends before that record.
        """
        self._follows = step, digest_of(state, [parameter.name for parameter in state.stored])

    def seal(
        self, state: LiveState, step: int, updates: Sequence[Update], progress: dict[str, Any], base_step: int
    ) -> FinalizedStep:
        """Build the record of ``step``, at which ``state`` is.

        Data on a device is added to the record once it has left the device.
        """
        parts, slots = [], []
        forgotten, self._forgotten = self._forgotten, False
        told = shorten(progress, None if forgotten else self._progress)
        self._progress = progress if self._shortens else None
        about: dict[str, Any] = {"base": base_step, "updates": [], "buffers": None, "progress": told}
        if self._follows is not None and self._follows[0] == step - 1:
            about[FOLLOWS] = self._follows[1]
        if self._is_first:  # a base before it may be of another kind of processor
            about[ARITHMETIC] = arithmetic_here(state)
        self._follows, self._is_first = None, False
        for update in updates:
            assert update.slot is not None and update.part is not None
            about["updates"].append({**update.about(), "part": len(parts)})
            parts.append(update.part)
            if update.slot not in slots:
                slots.append(update.slot)
        seen = self._buffers(state) | {SAMPLES: sampled(state.stored, step, self._views)}
        sealed = FinalizedStep(step, about, tuple(parts), tuple(slots))
        if devices_of(seen.values()):
            leaving = AsyncHostCopy(seen)
            sealed.finish = lambda: self._put(sealed, leaving.arrived(), forgotten)
            sealed.late_bytes = sum(tensor.nbytes for tensor in seen.values())
        else:
            self._put(sealed, seen, forgotten)
        return sealed

    def _put(self, sealed: FinalizedStep, seen: dict[str, torch.Tensor], forgotten: bool) -> None:
        """Add to the record the fingerprint and the changed buffers among ``seen``. Called in the order of steps."""
        if forgotten:
            self._digests.clear()
        samples, changed = seen.pop(SAMPLES), {}
        for key, tensor in seen.items():
            now = digest(tensor)
            if self._digests.get(key) != now:
                self._digests[key] = now
                changed[key] = tensor
        if changed:
            sealed.about["buffers"] = len(sealed.parts)
            sealed.parts += (image_of(changed),)
        sealed.about["fingerprint"] = hashed(samples)

    def _buffers(self, state: LiveState) -> dict[str, torch.Tensor]:
        """Return all buffers. Raises ``BadInput`` for one whose shape or dtype has changed."""
        found = {}
        for key, (atom, tensor) in state.buffers().items():
            now = (atom.dtype, atom.shape)
            was = self._kinds.setdefault(key, now)
            if now != was:
                raise BadInput(
                    f"buffer {atom.name} was {_told(was)} and is {_told(now)} now, which a resume could not put back."
                    " Give it its final shape and dtype, or register it with persistent=False."
                )
            found[key] = tensor
        return found


def _told(kind: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = kind
    return f"{dtype} {shape}"


SAMPLED_BYTES = 64
"""Bytes of each parameter that go into a fingerprint."""
Strides = Mapping[str, Sequence[int]]
"""Strides of parameters that are not contiguous, by name."""


class FlatViews:
    """The bytes of parameters as flat views, each made again only when its parameter's memory has changed.

    Making them takes half of the time of a fingerprint. A view keeps its memory alive, so an address cannot be reused.
    """

    def __init__(self) -> None:
        self._views: dict[int, tuple[tuple[Any, ...], torch.Tensor]] = {}
        """Place of the memory, and view, of each parameter by its position."""

    def view(self, position: int, parameter: torch.Tensor) -> torch.Tensor:
        """Return all bytes of this process's part of ``parameter``, in memory order."""
        if is_distributed(parameter):
            return _bytes_of(local_of(parameter.detach()))
        place = (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        known = self._views.get(position)
        if known is not None and known[0] == place:
            return known[1]
        view = _bytes_of(parameter.detach())
        if view.data_ptr() == parameter.data_ptr():  # not a copy
            self._views[position] = place, view
        return view


def fingerprint(parameters: Sequence[CapturedParameter], step: int, views: FlatViews | None = None) -> str:
    """Return the xxh3_64 of some bytes of this process's part of each parameter.

    The sampled bytes differ from ``step`` to step. ``views`` are those of the same parameters in earlier steps.
    """
    return hashed(sampled(parameters, step, views or FlatViews()))


def fingerprint_as(parameters: Sequence[CapturedParameter], step: int, strides: Strides) -> str:
    """Return the fingerprint of parameters whose memory order is that of ``strides``."""
    flats = [_bytes_of(_laid(local_of(p.parameter.detach()), strides.get(p.name))) for p in parameters]
    return hashed(_samples(flats, step))


def hashed(samples: torch.Tensor) -> str:
    """Return the fingerprint of the bytes that ``sampled`` returned."""
    return xxhash.xxh3_64_hexdigest(samples.cpu().numpy().data) if samples.numel() else ""


def sampled(parameters: Sequence[CapturedParameter], step: int, views: FlatViews) -> torch.Tensor:
    """Return the bytes that a fingerprint is made of, on the parameters' device."""
    return _samples([views.view(position, p.parameter) for position, p in enumerate(parameters)], step)


def _samples(flats: Sequence[torch.Tensor], step: int) -> torch.Tensor:
    """Return some bytes of each of ``flats``, one after the other."""
    samples = []
    for position, flat in enumerate(flats):
        places = max(1, flat.numel() // SAMPLED_BYTES)
        start = (step * 2654435761 + position * 40503) % places * SAMPLED_BYTES
        samples.append(flat[start : start + SAMPLED_BYTES])
    return torch.cat(samples) if samples else torch.empty(0, dtype=torch.uint8, device="cpu")


def _laid(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return a contiguous tensor with the elements of ``tensor`` in the memory order of ``strides``.

    The order is the contiguous one if ``strides`` is None, or has gaps.
    """
    if strides is not None and _is_dense(torch.empty_strided(tensor.shape, strides, device="meta")):
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return tensor.contiguous()


def _bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a parameter, in memory order."""
    tensor = parameter
    if not tensor.is_contiguous():
        tensor = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.contiguous()
    return flat_bytes(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


@dataclass
class ReplayRecord:
    """The part of a log record that a replay uses; ``about`` is the record's JSON.

    ``skipped`` names parameters that stay as they are: their loaded values are of a later step, or other records have
    them. ``held`` names the parameters that the record's rank stores (None: all), and ``shapes`` has their shapes there
    where these are others here. ``spreads`` holds, by update, buffers that the next record reuses.
    """

    about: dict[str, Any]
    parts: Sequence[memoryview]
    skipped: Collection[str] = ()
    held: Collection[str] | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    spreads: dict[int, codecs.Spreads] = field(default_factory=dict)


def apply(
    state: LiveState, records: Sequence[ReplayRecord], after_update: Callable[[], None] | None = None
) -> None:
    """Replay one step from ``records``, each of which holds a part of the gradients.

    The first record provides everything else. May overwrite the memory of the parts.
    """
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
        autocast = autocast_as(update.get("autocast"))
        with autocast, closing(state.rounds(optimizer, grads.keys())) as rounds:
            for names in rounds:
                some = {name: grads[name] for name in names if name in grads}
                _step(state, optimizer, some, update)
    failpoints.reach("in_replay")
    buffers = {}
    if about["buffers"] is not None and BUFFERS not in first.skipped:
        buffers = tensors_of(first.parts[about["buffers"]])
    if after_update is not None and about["updates"]:
        # after_update finds other buffers, such as a count of averages, as the last step left them
        own = state.buffers(beside=False).keys()
        state.load({key: buffer for key, buffer in buffers.items() if key in own})
        draw_again(about["updates"][-1].get("drawn_after"))
        with autocast_as(about["updates"][-1].get("autocast_after")):
            after_update()
    state.load(buffers)  # recorded after after_update


@torch.no_grad()
def clip_as_recorded(record: dict[str, Any], parts: list[memoryview]) -> None:
    """Multiply the gradients by the recorded clipping factors, so that they are as consumed."""
    for update in record["updates"]:
        if "coefficient" in update:
            grads = tensors_of(parts[update["part"]], "/grad")
            used = [grad for name, grad in grads.items() if name not in update["without"]]
            scale(used, decode(update.pop("coefficient")))


def _gradients(
    record: ReplayRecord, number: int, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return by parameter the gradients that update ``number`` consumed and this record provides."""
    update = record.about["updates"][number]
    held = parameters.keys() if record.held is None else record.held
    stored = {name: local_of(p.detach()) for name, p in parameters.items() if name in held}
    for name in record.shapes.keys() & stored.keys():  # of which only the form is of use
        stored[name] = stored[name].new_empty(()).expand(*record.shapes[name])
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
    if loss:  # the step had a closure, which was called before
        kwargs = {**kwargs, "closure": closure_again(loss[0])}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    there = [p.device for p in parameters if state.name_of[id(p)] in grads] or [p.device for p in parameters]
    device = there[0] if there else None  # None for a rank that stored nothing
    strides = update.get("strides", {})
    keeps_none = type(optimizer).__module__.startswith("torch.optim.")  # of the gradients' memory
    try:
        for parameter in parameters:
            name = state.name_of[id(parameter)]
            grad = grads.get(name)
            parameter.grad = None if grad is None else _like(parameter, grad, keeps_none, strides.get(name))
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


def _like(
    parameter: torch.Tensor, grad: torch.Tensor, may_be_itself: bool, strides: Sequence[int] | None
) -> torch.Tensor:
    """Return ``grad`` with the distribution and the memory layout of ``parameter``, or else with ``strides``.

    Raises ``ShardingMismatch`` if the shapes differ.
    """
    held = local_of(parameter.detach())
    if held.shape != grad.shape:
        raise ShardingMismatch(f"a gradient of {tuple(grad.shape)} is not for {tuple(held.shape)}")
    alike = grad.device == held.device and grad.stride() == (tuple(strides) if strides else held.stride())
    if may_be_itself and alike and not is_distributed(parameter):
        return grad
    made = torch.empty_like(parameter.detach())
    if strides is not None and not is_distributed(parameter):
        made = made.as_strided(made.shape, strides)
    # From pinned memory, which a replica's ring is, the copy is only queued; the fingerprint waits for it.
    local_of(made).copy_(grad, non_blocking=is_accelerator(made.device) and grad.is_pinned())
    return made


def _unhooked_step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """Call the optimizer's own ``step``, without the hooks around it."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer, *args, **kwargs)
