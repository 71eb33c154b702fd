"""The order of accesses to memory, by vector clocks: finds a copy that nobody waits for, whenever it happens to arrive.

Everything on the played device is done at once. The actors are its streams, threads of the host, and each write of a
base. Every access is noted, and one that conflicts with another actor's has to be ordered behind it: by an event that
was waited for, by a blocking copy, by a step that was put, or by a slot or a buffer that was given back. Memory of the
device belongs to the stream that it was made on: when it goes, other streams' accesses have to be known there, or told
by ``record_stream``.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

import played_device
from holdfast.checkpoint.capture.staging_buffers import StagingPool
from holdfast.checkpoint.log.log_records import RecordBuilder
from holdfast.checkpoint.log.recorder import Recorder
from holdfast.checkpoint.snapshot.snapshot_writer import PinnedChunks
from holdfast.io.buffers import Buffer
from holdfast.store.commit.generations import Generations
from holdfast.store.log.journal import JournalWriter
from played_device import COPIES, PLAYED, Played, Silent, plain

SCALAR = torch.ops.aten._local_scalar_dense.default


@dataclass
class Access:
    actor: str
    time: int
    writes: bool
    start: int
    end: int
    what: str


@dataclass
class Storage:
    stream: str
    start: int
    end: int
    others: set[str] = field(default_factory=set)


class Order(Silent):
    """Listens to the played device. ``problems`` are pairs of accesses in no order."""

    def __init__(self, monkeypatch):
        self.lock, self.here, self.problems = threading.RLock(), threading.local(), []
        self.clocks, self.accesses, self.made, self.given = defaultdict(dict), [], {}, {}
        real = played_device.run

        def run(func, args, kwargs):
            out = real(func, args, kwargs)
            with self.lock:
                self.done(func, args, kwargs, out)
            return out

        monkeypatch.setattr(played_device, "run", run)
        self._watch_host(monkeypatch)

    # Clocks

    @property
    def mine(self):
        """The clock of the calling thread."""
        self.here.clock = getattr(self.here, "clock", {})
        return self.here.clock

    def waits(self, stream, event):
        with self.lock:
            join(self.clocks[stream.name], event.told)

    def records(self, stream):
        with self.lock:
            join(self.clocks[stream.name], self.mine)
            return dict(self.clocks[stream.name])

    def synchronizes(self, event):
        with self.lock:
            join(self.mine, event.told)

    # Accesses

    def done(self, func, args, kwargs, out):
        """An operation of the device, on the stream of the calling thread."""
        stream, schema = PLAYED.current_stream().name, func._schema
        join(self.clocks[stream], self.mine)
        if any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return  # a view
        given = [
            *zip(schema.arguments, args, strict=False),
            *((a, kwargs.get(a.name)) for a in schema.arguments),
        ]
        for argument, value in given:
            for tensor in tensors_of(value):
                writes = bool(argument.alias_info and argument.alias_info.is_write)
                self.touch(stream, self.clocks[stream], *span(tensor), writes, schema.name)
        if not any(r.alias_info for r in schema.returns):
            for tensor in tensors_of(out):
                self.allocated(tensor, stream)
                self.touch(stream, self.clocks[stream], *span(tensor), True, schema.name)
        non_blocking = kwargs.get(
            "non_blocking", args[2] if func is not COPIES[0] and len(args) > 2 else False
        )
        kinds = {
            isinstance(x, Played) for x in pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)
        }
        if func is SCALAR or (func in COPIES and len(kinds) == 2 and not non_blocking):
            join(self.mine, self.clocks[stream])  # the host waits

    def reads(self, memory, what, actor=None):
        """The calling thread, or the ``actor`` that it starts, reads memory of the host. Returns the actor's clock."""
        with self.lock:
            clock = self.mine if actor is None else dict(self.mine)
            tensor = (
                memory if isinstance(memory, torch.Tensor) else torch.frombuffer(memory, dtype=torch.uint8)
            )
            self.touch(actor or threading.current_thread().name, clock, *span(tensor), False, what)
            return clock

    def touch(self, actor, clock, start, end, writes, what):
        if start == end:
            return
        clock[actor] = clock.get(actor, 0) + 1
        mine, kept = Access(actor, clock[actor], writes, start, end, what), []
        for other in self.accesses:
            overlaps = other.start < end and start < other.end
            if (
                overlaps
                and other.actor != actor
                and (writes or other.writes)
                and clock.get(other.actor, 0) < other.time
            ):
                self.problems.append(f"{what} [{actor}] beside {other.what} [{other.actor}]")
            if not (overlaps and writes and start <= other.start and other.end <= end):
                kept.append(other)
        self.accesses = [*kept, mine]

    # Memory

    def allocated(self, tensor, stream):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in self.made:
            start = storage.data_ptr()
            self.forget(start, start + storage.nbytes())
            self.made[storage._cdata] = Storage(stream, start, start + storage.nbytes())
            weakref.finalize(storage, self.freed, storage._cdata).atexit = False

    def allocates(self, tensor, on_host=False):
        with self.lock:
            self.allocated(tensor, PLAYED.current_stream().name)

    def used_by(self, tensor, stream):
        with self.lock:
            if (made := self.made.get(tensor.untyped_storage()._cdata)) is not None:
                made.others.add(stream.name)

    def freed(self, key):
        with self.lock:
            made = self.made.pop(key)
            known = dict(self.clocks[made.stream])
            join(known, self.mine)
            for a in self.accesses:
                within, of_stream = made.start <= a.start and a.end <= made.end, a.actor in self.clocks
                if (
                    within
                    and of_stream
                    and a.actor not in (made.stream, *made.others)
                    and known.get(a.actor, 0) < a.time
                ):
                    self.problems.append(f"memory of {made.stream} goes beside {a.what} [{a.actor}]")
            self.forget(made.start, made.end)

    def forget(self, start, end):
        self.accesses = [a for a in self.accesses if a.end <= start or end <= a.start]

    # What threads of the host do

    def _watch_host(self, monkeypatch):
        def around(cls, name, before=lambda *_: None, after=lambda *_: None):
            real = getattr(cls, name)

            def do(*args, **kwargs):
                before(*args)
                out = real(*args, **kwargs)
                after(out, *args)
                return out

            monkeypatch.setattr(cls, name, do)

        def hand(*things):
            with self.lock:
                for thing in things:
                    join(self.given.setdefault(id(thing), {}), self.mine)

        def get(*things):
            with self.lock:
                for thing in things:
                    join(self.mine, self.given.get(id(thing), {}))

        around(StagingPool, "give", lambda pool, slots: hand(*slots))
        around(StagingPool, "take", after=lambda slot, *_: get(slot))
        around(PinnedChunks, "take", after=lambda buffer, *_: get(buffer))
        around(Recorder, "put", lambda recorder, item: hand(item))
        around(Recorder, "_do", lambda recorder, group: get(*(group if isinstance(group, list) else [group])))
        around(
            RecordBuilder,
            "_put",
            lambda sealer, sealed, seen, _: [self.reads(t, "sealing") for t in seen.values()],
        )
        around(
            JournalWriter,
            "append",
            lambda journal, records, *_: [self.reads(p, "a record") for r in records for p in r.parts],
        )
        around(Buffer, "__init__", after=lambda _, buffer, *__: self.forget(*span(whole(buffer.view))))
        real, count = Generations.write, iter(range(1 << 30))

        def write(files, generation, image, **options):
            clock = self.reads(image, "a base", f"write {next(count)}")
            written = real(files, generation, image, **options)
            written.add_done_callback(lambda _: self._written(clock))
            return written

        monkeypatch.setattr(Generations, "write", write)

    def _written(self, clock):
        """What the thread that does it gives back, it does knowing that the write is over."""
        with self.lock:
            join(self.mine, clock)

    def hand_back(self, monkeypatch):
        """Let a buffer of a base carry what the thread that gives it back knows."""
        real = PinnedChunks.give

        def give(landing, buffer):
            with self.lock:
                join(self.given.setdefault(id(buffer), {}), self.mine)
            real(landing, buffer)

        monkeypatch.setattr(PinnedChunks, "give", give)


def join(clock, other):
    for actor, time in other.items():
        clock[actor] = max(clock.get(actor, 0), time)


def tensors_of(tree):
    found = [plain(x) for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [t for t in found if not isinstance(t, Played) and t.numel() and t.layout == torch.strided]


def whole(view):
    return torch.frombuffer(view, dtype=torch.uint8)


def span(tensor):
    """Where a tensor begins and ends."""
    if not tensor.numel():
        return 0, 0
    elements = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
