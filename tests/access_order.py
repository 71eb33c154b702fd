"""The order of accesses: a race detector for the engine's device code, which is deterministic.

Everything is done at once on the device that is played, so values are right; what is checked is order. Actors are the
streams, the handler of each operation and each transfer of the SSD; each has a vector clock. Two accesses to the same
bytes, one of which writes, have to be ordered: by an event that a stream waited for, by what the executor waits for
(that an operation is over or, where a pair of lanes is ``ahead``, begun), by a buffer that was given back and taken
again, or by whoever held the memory until an event. Else they are a problem, named by both sides, whether they met or
not.

Memory of the device belongs to the stream it was made on. When it goes, every access of another stream has to be known
to that stream, to the thread that lets go, to a hold, or to ``record_stream``.

The executor's own waits are trusted, and so is who says that an operation is over; ``streams.py`` watches these.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.io.buffers import Buffer, BufferPool
from holdfast.offload import engine, executor
from holdfast.offload.memory import device as device_module
from holdfast.offload.memory.device import SeparateDevice
from holdfast.offload.memory.transfer_pool import TransferPool
from holdfast.offload.model import microbatches
from holdfast.schedule.operations import COMPUTE
from holdfast.store.commit.generations import Generations
from holdfast.store.scratch import Scratch
from played_device import PLAYED, Played, Silent, plain, tensors_in

GRAIN = 1 << 12
"""Accesses are looked up by pages of so many bytes."""


LOOKING = ("check_losses", "norm", "norm_block")
"""Computations that look at what they have computed, on the host."""


class Here(threading.local):
    """Of each thread: the clock and the name of the actor that it is at present, and the step that it works for."""

    def __init__(self):
        self.clock, self.actor, self.step, self.transfers = {}, threading.current_thread().name, None, []
        self.lending = False


def join(clock, other):
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


def address(view):
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def span(tensor):
    """Where a tensor begins, and how many bytes there are to its end."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


class Access:
    __slots__ = ("actor", "end", "start", "time", "what", "write")

    def __init__(self, actor, time, write, start, end, what):
        self.actor, self.time, self.write, self.start, self.end, self.what = (
            actor,
            time,
            write,
            start,
            end,
            what,
        )


class Order(Silent):
    """What has been accessed by whom, and what of that is in no order."""

    def __init__(self):
        self.here, self.lock = Here(), threading.RLock()
        self.pages, self.streams, self.times = {}, defaultdict(dict), defaultdict(int)
        self.problems, self.accesses = [], 0
        self.made, self.free_at = {}, defaultdict(dict)
        self.done, self.latest, self.kept, self.transfers = {}, {}, [], 0

    def problem(self, text):
        if text not in self.problems:
            self.problems.append(text)

    def touch(self, actor, clock, start, nbytes, write, what):
        if not nbytes:
            return
        self.accesses += 1
        self.times[actor] += 1
        clock[actor] = self.times[actor]
        me, told, end = (
            Access(actor, self.times[actor], write, start, start + nbytes, what),
            set(),
            start + nbytes,
        )
        for page in range(start // GRAIN, -(-end // GRAIN)):
            left = []
            for other in self.pages.get(page, ()):
                meets = other.start < end and start < other.end and other.actor != actor
                meets = meets and (write or other.write) and id(other) not in told
                if meets and clock.get(other.actor, 0) < other.time:
                    told.add(id(other))
                    self.problem(f"{_does(me)} beside {_does(other)}")
                covered = start <= other.start and other.end <= end
                if not (covered and (write or (other.actor == actor and not other.write))):
                    left.append(other)
            self.pages[page] = [*left, me]

    def on_stream(self, stream, tensor, write, what):
        with self.lock:
            join(self.streams[stream], self.here.clock)
            self.touch(stream, self.streams[stream], *span(tensor), write, what)

    def on_host(self, start, nbytes, write, what):
        with self.lock:
            self.touch(self.here.actor, self.here.clock, start, nbytes, write, what)

    def side(self, tensor, write, what):
        """An access by a computation or a copy: of the present stream."""
        self.on_stream(PLAYED.current_stream().name, tensor, write, what)

    # What the device that is played tells

    def waits(self, stream, event):
        with self.lock:
            join(self.streams[stream.name], event.told)

    def records(self, stream):
        with self.lock:
            join(self.streams[stream.name], self.here.clock)
            return dict(self.streams[stream.name])

    def synchronizes(self, event):
        with self.lock:
            join(self.here.clock, event.told)

    def copies(self, target, source):
        name = f"copy on {PLAYED.current_stream().name}"
        self.side(source, False, name)
        self.side(target, True, name)

    def computes(self, func, args, kwargs, made):
        for tensor, write in accessed(func, args, kwargs):
            self.side(tensor, write, schema_of(func).name)
        if schema_of(func).makes:
            for tensor in pytree.tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    self.allocates(tensor)
                    self.side(tensor, True, schema_of(func).name)

    def allocates(self, tensor, on_host=False):
        storage, stream = tensor.untyped_storage(), None if on_host else PLAYED.current_stream().name
        with self.lock:
            if storage._cdata in self.made:
                return
            self.made[storage._cdata] = (stream, set(), storage.data_ptr(), storage.nbytes())
        weakref.finalize(storage, self.frees, storage._cdata).atexit = False

    def used_by(self, tensor, stream):
        self.made[tensor.untyped_storage()._cdata][1].add(stream.name)

    def frees(self, key):
        with self.lock:
            stream, others, start, nbytes = self.made.pop(key)
            known = self.free_at.pop(start, {})
            join(known, self.streams.get(stream, {}))
            join(known, self.here.clock)
            for page in range(start // GRAIN, -(-(start + nbytes) // GRAIN)):
                inside = [a for a in self.pages.get(page, ()) if start <= a.start < start + nbytes]
                for access in inside:
                    foreign = (
                        stream and access.actor in self.streams and access.actor not in (stream, *others)
                    )
                    if foreign and known.get(access.actor, 0) < access.time:
                        self.problem(f"memory of {stream} is let go of beside {_does(access)}")
                self.pages[page] = [a for a in self.pages.get(page, ()) if a not in inside]

    def forget(self, start, nbytes):
        """Memory goes back to the system: what lies there next is another's."""
        with self.lock:
            for page in range(start // GRAIN, -(-(start + nbytes) // GRAIN)):
                left = [a for a in self.pages.get(page, ()) if not start <= a.start < start + nbytes]
                self.pages[page] = left

    def held_until(self, tensor, clock):
        with self.lock:
            join(self.free_at[plain(tensor).untyped_storage().data_ptr()], clock)


def _does(access):
    return f"{access.what} [{access.actor}] {'writes' if access.write else 'reads'}"


class Schema(NamedTuple):
    """What an operation does to the memory of its arguments and of what it returns."""

    name: str
    arguments: list[tuple[str, bool, bool]]
    """The name of each, whether the operation looks into it, and whether it writes it."""
    makes: bool
    """Whether what it returns is new."""


@cache
def schema_of(func):
    schema = func._schema
    blind = schema.name.endswith("_like") or schema.name.startswith("aten::new_")
    infos = [(argument.name, argument.alias_info) for argument in schema.arguments]
    arguments = [
        (name, not blind and (info is None or info.is_write), bool(info and info.is_write))
        for name, info in infos
    ]
    return Schema(schema.name, arguments, not any(result.alias_info for result in schema.returns))


def accessed(func, args, kwargs):
    """The tensors that ``func`` is given and looks into, and whether it writes them."""
    found = []
    for place, (name, looks, writes) in enumerate(schema_of(func).arguments):
        if looks and (place < len(args) or name in kwargs):
            for tensor in tensors_in([args[place] if place < len(args) else kwargs[name]]):
                if tensor.layout == torch.strided and tensor.numel():
                    found.append((tensor, writes))
    return found


class Watching(TorchDispatchMode):
    """Notes what the present thread's operations read and write in host memory."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = accessed(func, args, kwargs)
        if not any(isinstance(tensor, Played) for tensor, _ in tensors):
            for tensor, write in tensors:
                if tensor.device.type == "cpu":
                    self.order.on_host(*span(tensor), write, schema_of(func).name)
            if schema_of(func).makes:
                for tensor in pytree.tree_leaves(out):
                    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, Played):
                        self.order.allocates(
                            tensor, on_host=True
                        )  # so that what lies there next is another's
        return out


@contextmanager
def watched(monkeypatch):
    """Yield the ``Order`` of all that engines on the device do inside."""
    order = Order()
    monkeypatch.setattr(PLAYED, "listener", order)
    for patch in (_executor, _device, _memory, _model, _transfers):
        patch(order, monkeypatch)
    yield order


def _executor(order, monkeypatch):
    """Handlers begin with what the executor guarantees: by what they need, not by when it came to be."""
    real_handlers, real_run = engine.handlers, executor.Executor.run

    def handlers(run):
        def for_step(handle):
            def handled(op, step):
                before, order.here.step = order.here.step, step
                try:
                    return handle(op, step)
                finally:
                    order.here.step = before

            return handled

        return {kind: for_step(handle) for kind, handle in real_handlers(run).items()}

    def run(self, operations, step):
        order.kept.append(step)  # steps are known by their identity
        with order.lock:
            step.began = dict(order.here.clock)
            step.previous = {key: order.latest.get(key) for op in operations for key in op.needs_previous}
            order.latest.update({op.key: step for op in operations})
        return real_run(self, operations, step)

    monkeypatch.setattr(engine, "handlers", handlers)
    monkeypatch.setattr(executor.Executor, "run", run)


def _device(order, monkeypatch):
    real_lane, real_ended, real_let_go = SeparateDevice.lane, SeparateDevice.ended, device_module._let_go

    @contextmanager
    def lane(self, op):
        here, step = order.here, order.here.step
        before = here.clock, here.actor, here.transfers
        clock = here.clock if op.lane == COMPUTE else {}
        with order.lock:
            join(clock, step.began)
            first = op.needs[0] if op.needs else None
            needed = [(key, step) for key in op.needs] + [
                (key, step.previous.get(key)) for key in op.needs_previous
            ]
            for key, of in needed:
                found = order.done.get((id(of), key))
                if found is not None:
                    lane, begun, over = found
                    follows = (lane, op.lane) in self.ahead and (lane != COMPUTE or key == first)
                    join(clock, begun if follows else over)
        here.clock, here.transfers = clock, []
        here.actor = f"{op.key.kind} {op.key.block} {op.key.micro_batch} {op.key.phase}".strip()
        try:
            with real_lane(self, op), order_of(op, self):
                yield
            with order.lock:
                over = dict(here.clock)
                for transfer in here.transfers:
                    join(over, transfer)
                order.done[id(step), op.key] = op.lane, dict(here.clock), over
        finally:
            here.clock, here.actor, here.transfers = before

    @contextmanager
    def order_of(op, device):
        stream = device._streams.get(op.lane)
        if stream is None:
            with Watching(order):
                yield
            return
        with order.lock:  # what is asked of the stream from now on comes after what this handler knows
            join(order.streams[PLAYED.current_stream().name], order.here.clock)
        with Watching(order) if op.key.kind in LOOKING else nullcontext():
            yield

    def ended(self, op):
        step, future = order.here.step, real_ended(self, op)
        if future is not None:
            with order.lock:
                over = order.done[id(step), op.key][2]
                join(over, self._marks[op.key][1].told)
        return future

    def let_go(mark, tensors, done):
        def known():
            for tensor in tensors:
                order.held_until(tensor, order.here.clock)
            if done is not None:
                done()

        real_let_go(mark, tensors, known)

    monkeypatch.setattr(SeparateDevice, "lane", lane)
    monkeypatch.setattr(SeparateDevice, "ended", ended)
    monkeypatch.setattr(device_module, "_let_go", let_go)


def _memory(order, monkeypatch):
    """Host memory that is given back is known to whoever takes it next, as far as its last holder was."""
    real_take, real_give, real_lend = BufferPool.take, BufferPool.give, TransferPool.lend
    real_free = Buffer.free

    def back(start):
        with order.lock:
            join(order.free_at[start], order.here.clock)
            join(order.free_at[start], order.free_at.get(("transfer", start), {}))

    def take(self, nbytes, kind):
        buffer = real_take(self, nbytes, kind)
        start = address(buffer.view)
        with order.lock:
            join(order.here.clock, order.free_at[start])
        if not order.here.lending:
            order.on_host(start, buffer.nbytes, True, f"taking for {kind}")
        return buffer

    def give(self, buffer):
        back(address(buffer.view))
        real_give(self, buffer)

    def lend(self, nbytes, kind, from_top=False):
        order.here.lending = True
        try:
            flat, view = real_lend(self, nbytes, kind, from_top)
        finally:
            order.here.lending = False
        start = flat.data_ptr()
        with order.lock:
            join(order.here.clock, order.free_at.pop(start, {}))
        order.on_host(start, len(view), True, f"lending for {kind}")
        weakref.finalize(flat.untyped_storage(), back, start).atexit = False
        return flat, view

    def free(self):
        order.forget(address(self.view), self.memory_bytes)
        real_free(self)

    monkeypatch.setattr(Buffer, "free", free)
    monkeypatch.setattr(BufferPool, "take", take)
    monkeypatch.setattr(BufferPool, "give", give)
    monkeypatch.setattr(TransferPool, "lend", lend)


def _model(order, monkeypatch):
    """A micro-batch's thread knows what the thread knows that lets it run."""
    real_state = microbatches._thread_state

    def state():
        enter, clock, step = real_state(), order.here.clock, order.here.step

        def entered(stack):
            order.here.clock, order.here.actor, order.here.step = clock, "the model", step
            enter(stack)

        return entered

    monkeypatch.setattr(microbatches, "_thread_state", state)


def _transfers(order, monkeypatch):
    """Each transfer of the SSD is an actor, which begins with what its handler knows."""

    def patch(kind, name, writes):
        real = getattr(kind, name)

        def transfer(self, where, view, *args, **options):
            start = address(view) if len(view) else 0
            with order.lock:
                order.transfers += 1
                clock = dict(order.here.clock)
                what = f"{name} {options.get('kind', '')}"
                order.touch(f"transfer {order.transfers}", clock, start, len(view), writes, what)
                order.here.transfers.append(clock)
                if options.get("phase") in ("setup", "export"):  # whoever asks for it waits for it
                    join(order.here.clock, clock)
            future = real(self, where, view, *args, **options)
            future.add_done_callback(lambda _: order.free_at.__setitem__(("transfer", start), clock))
            return future

        monkeypatch.setattr(kind, name, transfer)

    for kind in (Scratch, Generations):
        patch(kind, "read", True)
        patch(kind, "write", False)
