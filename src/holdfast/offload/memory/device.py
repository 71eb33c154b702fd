"""The device that computes, and the copies to and from it.

On a CPU the device is host memory: an upload or a download hands the tensor over. The byte counters count what an
operation hands over, which on a separate device crosses the bus.

A separate device (CUDA, or another with streams, events and memory of its own) has three streams: the caller's, which
computes, one for uploads, and one for downloads. Where ``ahead`` says so, an operation is started as soon as the
operations that it needs have been started, and waits for them on the device, by an event. Everything else waits until
what it needs is over on the device, which one thread per stream detects. Therefore:

* host memory is read, written and lent again only when no copy is under way,
* no more device memory is in use than a schedule has slots,
* nothing waits for the whole device.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ... import accelerators
from ...errors import BadInput
from ...optim.torch_threads import SpinRule
from ...quantities import format_bytes
from ...schedule.operations import COMPUTE, DOWNLOAD, UPLOAD, Key, Op
from ..executor import Lane

Lends = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Function that provides host memory for copies of tensors."""

Held = tuple[list[torch.Tensor], Callable[[], object] | None]
"""Tensors that copies use, and a function to call when these are over."""


class HostDevice:
    """The CPU, which computes in host memory (``unified``)."""

    unified = True
    ahead: frozenset[tuple[str, str]] = frozenset()

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._spins = SpinRule()

    def use(self) -> None:
        """Select the device for the calling thread.

        Called first by every thread that waits for the device or pins memory, because the selection is per thread.
        """

    def begins(self) -> None:
        """Begin a step on the calling thread."""
        self._spins.choose()

    def close(self) -> None:
        """Release streams and threads. Nothing may be under way."""
        self._spins.close()

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device and return it, ready."""
        return tensor

    def upload(
        self, tensors: Sequence[torch.Tensor], done: Callable[[], object] | None = None
    ) -> list[torch.Tensor]:
        """Return host tensors on the device, for computations that follow.

        ``done`` is called when copies of them have been made; never if the tensors are handed over.
        """
        return list(tensors)

    def download(self, tensors: Sequence[torch.Tensor], lend: Lends) -> list[torch.Tensor]:
        """Return device tensors in host memory, readable when the operation is over.

        ``lend`` provides the host memory if they have to be copied.
        """
        return list(tensors)

    def refresh(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the host tensor ``source`` over ``target`` on the device, for computations that follow."""
        target.copy_(source)

    def leave(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return host copies of a computation's ``tensors``, readable when the computation is over."""
        return tensors

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in host memory, after waiting for the computations so far."""
        return tensor

    def pin(self, memory: memoryview) -> Callable[[], object] | None:
        """Pin ``memory`` so that the device alone can copy to and from it.

        Returns the function that unpins ``memory``; None if it cannot be pinned.
        """
        return None

    def free_bytes(self) -> int:
        """Return 0: the host's memory is not counted here."""
        return 0

    def take_batch(self, batch: Any) -> Any:
        """Return the micro-batch with its tensors on the device."""
        return batch

    def take_buffers(self, model: nn.Module) -> None:
        """Move the model's buffers to the device."""


class SeparateDevice:
    """One accelerator, reached through ``accelerators`` alone. Tests play a device in Python and drive this class."""

    unified = False
    ahead = frozenset({(COMPUTE, COMPUTE), (UPLOAD, COMPUTE), (COMPUTE, DOWNLOAD)})
    """Pairs of lanes: an operation of the second lane waits on the device for an operation of the first."""

    def __init__(self, name: str) -> None:
        self.torch_device = accelerators.with_index(torch.device(name))
        self._prepare()

    def _prepare(self) -> None:
        self._streams: dict[str, Any] = {}
        self._watchers: dict[str, Lane] = {}
        self._marks: dict[Key, tuple[str, Any]] = {}
        """Lane of the newest operation of each key, and the event that marks its end."""
        self._held = threading.local()
        """``of_operation``: the holds of the operation that the calling thread runs, or None."""
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
        """Run the body of ``op`` on the lane of the operation, after the operations that it needs."""
        stream = self._streams.get(op.lane)
        if stream is None:
            yield
            return
        for key in (*op.needs, *op.needs_previous):
            lane, mark = self._marks.get(key, (op.lane, None))
            if lane != op.lane and (lane, op.lane) in self.ahead:
                stream.wait_event(mark)
        self._held.of_operation = []
        try:
            with self._on(stream):
                yield
        except BaseException:
            with suppress(Exception):
                self._watch(op.lane, self._record(stream))
            raise

    def ended(self, op: Op) -> Future | None:
        """Return a future that is done when ``op`` is over on the device; None if it does not run there.

        Called when all of ``op`` has been queued.
        """
        stream = self._streams.get(op.lane)
        if stream is None:
            return None
        mark = self._record(stream)
        self._marks[op.key] = op.lane, mark
        return self._watch(op.lane, mark)

    def _watch(self, lane: str, mark: Any) -> Future:
        """Return a future that is done after the event ``mark``, when the holds of the operation have been let go."""
        over: Future = Future()
        held, self._held.of_operation = self._holds(), None
        self._watchers[lane].put(partial(_tell, mark, over, held or []))
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
        """Return the device memory that is free, plus what this process has reserved and does not use."""
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
        """Keep ``tensors`` until the copies that the calling thread has started are over; then call ``done``.

        Within an operation they are kept until it is over: one event and one wake of the watcher serve all its copies.
        """
        held = self._holds()
        if held is not None:
            held.append((tensors, done))
        else:
            self._watchers[lane].put(partial(_let_go, self._record(self._current_stream()), tensors, done))

    def _holds(self) -> list[Held] | None:
        return getattr(self._held, "of_operation", None)

    # Calls that tests override to simulate a device

    def _new_stream(self, lane: str) -> Any:
        return accelerators.new_stream(self.torch_device)

    def _current_stream(self) -> Any:
        return accelerators.current_stream(self.torch_device)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return accelerators.on_stream(stream)

    def _record(self, stream: Any) -> Any:
        return accelerators.record_event(stream)

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate space for ``tensor`` on the device.

        The allocator does not reuse it for a later copy while a computation still uses it, whoever releases it.
        """
        made = torch.empty_like(tensor, device=self.torch_device)
        made.record_stream(self._streams[COMPUTE])
        return made

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def _sent(self, leaf: Any) -> Any:
        """Send a leaf of a micro-batch to the device, in the order of the stream that computes."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pinned = leaf.pin_memory() if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
        return pinned.to(self.torch_device, non_blocking=True)


Device = HostDevice | SeparateDevice


def _tell(mark: Any, over: Future, held: list[Held]) -> None:
    """Let go of ``held`` and complete ``over`` when the event ``mark`` has occurred, or with the device's error."""
    try:
        mark.synchronize()
    except BaseException as error:
        over.set_exception(error)
        return
    while held:
        _let_go(mark, *held.pop(0))
    over.set_result(None)


def _let_go(mark: Any, tensors: list[torch.Tensor], done: Callable[[], object] | None) -> None:
    """Hold ``tensors`` until the event ``mark`` has occurred; then call ``done``.

    An error of the device is reported by the operation that the tensors belong to.
    """
    with suppress(Exception):
        mark.synchronize()
        if done is not None:
            done()


def open_device(name: str) -> Device:
    """Open the device ``name``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``.

    ``"auto"`` is this machine's accelerator, if there is one that can be used. Raises ``BadInput`` for a device that is
    absent or that cannot copy while it computes.
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
