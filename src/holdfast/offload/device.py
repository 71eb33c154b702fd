"""The device that computes, and how bytes get there.

On a CPU the device is host memory: an upload or a download hands the tensor over. The byte counters count
what an operation hands over, which on a separate device is what crosses the bus.

A separate device (CUDA, and whatever else has streams, events and memory of its own) has three streams: the caller's,
which computes, one for copies to the device, and one for copies from it. Where ``ahead`` says so, an operation is begun
as soon as what it needs has been begun, and waits for it on the device, by an event. Everything else waits until what
it needs is over there, which a thread for each stream finds out. So host memory is read, written and lent again only
when no copy is under way, no more device memory is in use than a schedule has slots, and nothing waits for a whole
device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import accelerators
from ..errors import BadInput
from ..plan.ops import COMPUTE, DOWNLOAD, UPLOAD, Key, Op
from ..units import format_bytes
from .executor import Lane

Lends = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Gives host memory for copies of tensors."""


class HostDevice:
    """The CPU. ``unified``: the device computes in host memory."""

    unified = True
    ahead: frozenset[tuple[str, str]] = frozenset()

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def use(self) -> None:
        """Called first by every thread that waits for the device or pins memory: the device is that thread's own."""

    def begins(self) -> None:
        """The calling thread begins a step."""

    def lane(self, op: Op) -> AbstractContextManager[None]:
        """What ``op`` does inside is done on its lane, after what it needs."""
        return nullcontext()

    def ended(self, op: Op) -> Future | None:
        """All of ``op`` has been asked for: what is done when it is over, if it is not over now."""
        return None

    def close(self) -> None:
        """Nothing is under way any more, nor will be."""

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` of host memory, on the device. Ready when it returns."""
        return tensor

    def upload(
        self, tensors: Sequence[torch.Tensor], done: Callable[[], object] | None = None
    ) -> list[torch.Tensor]:
        """``tensors`` of host memory, on the device, for computations that follow. ``done`` is called when copies have
        been made of them; if they are handed over, never."""
        return list(tensors)

    def download(self, tensors: Sequence[torch.Tensor], lend: Lends) -> list[torch.Tensor]:
        """``tensors`` of the device, in host memory, which ``lend`` gives if they have to be copied. Readable when the
        operation is over."""
        return list(tensors)

    def refresh(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` of host memory over ``target`` on the device, for computations that follow."""
        target.copy_(source)

    def leave(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of a computation's ``tensors`` in host memory. Readable when that is over."""
        return tensors

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in host memory: waits for the computations so far."""
        return tensor

    def pin(self, memory: memoryview) -> Callable[[], object] | None:
        """Copies to and from ``memory`` are to be made by the device alone, until what is returned is called; None if
        they cannot be."""
        return None

    def free_bytes(self) -> int:
        """The host's memory is not counted here."""
        return 0

    def take_batch(self, batch: Any) -> Any:
        """A micro-batch whose tensors are on the device."""
        return batch

    def take_buffers(self, model: nn.Module) -> None:
        """Move the model's buffers to the device."""


class SeparateDevice:
    """One accelerator, asked by way of ``accelerators`` alone. Never run on one yet: tests play a device in Python,
    which this very class drives."""

    unified = False
    ahead = frozenset({(COMPUTE, COMPUTE), (UPLOAD, COMPUTE), (COMPUTE, DOWNLOAD)})
    """Pairs of lanes: an operation of the second waits on the device for one of the first."""

    def __init__(self, name: str) -> None:
        self.torch_device = accelerators.with_index(torch.device(name))
        self._prepare()

    def _prepare(self) -> None:
        self._streams: dict[str, Any] = {}
        self._watchers: dict[str, Lane] = {}
        self._marks: dict[Key, tuple[str, Any]] = {}
        """Of the newest operation of each key: its lane, and the event of its end."""
        self._pins = True

    def use(self) -> None:
        accelerators.use_device(self.torch_device)

    def begins(self) -> None:
        if not self._watchers:
            self._streams = {lane: self._new_stream(lane) for lane in (UPLOAD, DOWNLOAD)}
            lanes = (COMPUTE, UPLOAD, DOWNLOAD)
            self._watchers = {lane: Lane(1, f"holdfast-{lane}-over", self.use) for lane in lanes}
        self._streams[COMPUTE] = self._current_stream()

    @contextmanager
    def lane(self, op: Op) -> Iterator[None]:
        stream = self._streams.get(op.lane)
        if stream is None:
            yield
            return
        for key in (*op.needs, *op.needs_previous):
            lane, mark = self._marks.get(key, (op.lane, None))
            if lane != op.lane and (lane, op.lane) in self.ahead:
                stream.wait_event(mark)
        with self._on(stream):
            yield

    def ended(self, op: Op) -> Future | None:
        stream = self._streams.get(op.lane)
        if stream is None:
            return None
        mark, over = self._record(stream), Future()
        self._marks[op.key] = op.lane, mark
        self._watchers[op.lane].put(partial(_tell, mark, over))
        return over

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()
        self._prepare()

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device)

    def upload(
        self, tensors: Sequence[torch.Tensor], done: Callable[[], object] | None = None
    ) -> list[torch.Tensor]:
        there = [self._empty(tensor) for tensor in tensors]
        for target, source in zip(there, tensors, strict=True):
            self._copy(target, source)
        self._hold(UPLOAD, [*tensors], done)
        return there

    def download(self, tensors: Sequence[torch.Tensor], lend: Lends) -> list[torch.Tensor]:
        here = lend(tensors)
        for target, source in zip(here, tensors, strict=True):
            self._copy(target, source)
        self._hold(DOWNLOAD, [*tensors, *here])
        return here

    def refresh(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target, source)
        self._hold(UPLOAD, [target, source])

    def leave(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: t.to("cpu", non_blocking=True, copy=True) for name, t in tensors.items()}

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        here = tensor.to("cpu", non_blocking=True)
        self._record(self._current_stream()).synchronize()
        return here

    def pin(self, memory: memoryview) -> Callable[[], object] | None:
        if not self._pins:
            return None
        try:
            return accelerators.pin(memory, self.torch_device)
        except accelerators.CannotPin as error:
            self._pins = False
            warnings.warn(
                f"{format_bytes(len(memory))} of host memory cannot be pinned ({error.reason}), so copies wait for each"
                " other and for the host. Give a smaller host budget, or raise what may be locked (ulimit -l), which"
                " some drivers keep to.",
                stacklevel=2,
            )
            return None

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken, with what this process has taken and does not use."""
        return accelerators.free_bytes(self.torch_device)

    def take_batch(self, batch: Any) -> Any:
        return pytree.tree_map(self._sent, batch)

    def take_buffers(self, model: nn.Module) -> None:
        moved: dict[int, torch.Tensor] = {}  # a buffer of several modules stays one
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved.setdefault(id(buffer), buffer.to(self.torch_device))

    def _hold(self, lane: str, tensors: list[torch.Tensor], done: Callable[[], object] | None = None) -> None:
        """Keep ``tensors`` until the copies of them that the calling thread has begun are over, then call ``done``."""
        self._watchers[lane].put(partial(_let_go, self._record(self._current_stream()), tensors, done))

    # The calls that a device which is played answers otherwise

    def _new_stream(self, lane: str) -> Any:
        return accelerators.new_stream(self.torch_device)

    def _current_stream(self) -> Any:
        return accelerators.current_stream(self.torch_device)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return accelerators.on_stream(stream)

    def _record(self, stream: Any) -> Any:
        return accelerators.record_event(stream)

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for ``tensor`` on the device. The allocator does not give it to a later copy while something computes
        with it, whoever lets go of it."""
        made = torch.empty_like(tensor, device=self.torch_device)
        made.record_stream(self._streams[COMPUTE])
        return made

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def _sent(self, leaf: Any) -> Any:
        """A leaf of a micro-batch, on its way to the device in the order of the stream that computes."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pinned = leaf.pin_memory() if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
        return pinned.to(self.torch_device, non_blocking=True)


Device = HostDevice | SeparateDevice


def _tell(mark: Any, over: Future) -> None:
    """``over`` is done when ``mark`` has come."""
    try:
        mark.synchronize()
    except BaseException as error:
        over.set_exception(error)
        return
    over.set_result(None)


def _let_go(mark: Any, tensors: list[torch.Tensor], done: Callable[[], object] | None) -> None:
    """Hold ``tensors`` until ``mark`` has come. An error of the device is told by the operation that they belong to."""
    with suppress(Exception):
        mark.synchronize()
        if done is not None:
            done()


def open_device(name: str) -> Device:
    """Open ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or with ``"auto"`` this machine's accelerator if there is one.

    Raises ``BadInput`` for a device that is not here, or that cannot copy beside computing.
    """
    kind = accelerators.current_kind()
    if name == "auto":
        name = kind if kind and accelerators.can_offload(torch.device(kind)) else "cpu"
    try:
        wanted = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"device {name!r} is not one of cpu, cuda, cuda:N, auto") from error
    if wanted.type == "cpu":
        return HostDevice()
    here = accelerators.names_here()
    if wanted.type != kind or (wanted.index or 0) >= len(here):
        known = ", ".join(["cpu", *here])
        raise BadInput(f'device {name!r} is not here: pass device="auto", or one of {known}')
    accelerators.refuse_without_streams(wanted)
    accelerators.refuse_unrecorded([wanted])
    return SeparateDevice(name)
