"""A separate device that is played: its streams are queues, what is put there is done late, and order is checked.

Memory is the host's, and computing is done at once, on the thread that asks for it. Copies are not: until one is made,
its target holds rubbish, its source may change, and nobody but the device keeps either alive. An operation that begins
before what it needs is over, and that does not wait for its event either, is noted in ``problems``.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from holdfast.offload import ops
from holdfast.offload.executor import Lane
from holdfast.offload.memory.device import SeparateDevice

DELAYS = (0.0, 0.0, 0.0, 0.0003, 0.001)
"""Seconds, one of which passes before a stream does its next thing."""


class Mark:
    """An event: comes when all that was put before it has been done. ``clock``: how far streams are then."""

    def __init__(self, clock):
        self.clock, self._come = clock, threading.Event()
        self.come = self._come.set

    @property
    def has_come(self):
        return self._come.is_set()

    def arrive(self):
        assert self._come.wait(20), "an event never came"

    def synchronize(self):
        """What the host calls, and where a device tells of an error."""
        self.arrive()


class Stream:
    """Does one thing after the other. ``clock``: by name, how many marks of each stream it is behind."""

    def __init__(self, name, delays, computes=False):
        self.name, self._delays, self._computes = name, delays, computes
        self.clock, self._lock = {name: 0}, threading.Lock()
        self._lane = Lane(1, f"played-{name}")
        self.close = self._lane.close

    def put(self, job):
        delay = self._delays()

        def do():
            time.sleep(delay)
            job()

        self._lane.put(do)

    def record(self):
        with self._lock:
            self.clock = {**self.clock, self.name: self.clock[self.name] + 1}
            mark = Mark(self.clock)
            self.put(mark.come)
        return mark

    def wait_event(self, mark):
        with self._lock:
            names = {**self.clock, **mark.clock}
            self.clock = {name: max(self.clock.get(name, 0), mark.clock.get(name, 0)) for name in names}
            self._lane.put(mark.arrive)
        if self._computes:  # it does so on the calling thread
            mark.arrive()


def _handle_on_device(run, function, op, step, real=ops._handle_on_device):
    with run.device.of(step) if isinstance(run.device, Apart) else nullcontext():
        return real(run, function, op, step)


ops._handle_on_device = _handle_on_device  # a lane is not told of its step otherwise


class Apart(SeparateDevice):
    """A separate device, as far as the engine can tell."""

    def __init__(self, delays=DELAYS, seed=0):
        self.torch_device = torch.device("cpu")
        self.problems, self.pinned, self.pins = [], {}, 0
        self.copies = {"up": 0, "down": 0}
        self._delays, self._random = delays, random.Random(seed)
        self._here = threading.local()
        self._computing = None
        self._numbers, self._begun, self._by_step = {}, 0, {}
        self._prepare()

    def delay(self):
        return self._random.choice(self._delays)

    @contextmanager
    def lane(self, op):
        with super().lane(op):
            stream = self._streams.get(op.lane)
            for key, mark in self._needed(op):
                if mark is not None and not mark.has_come and not (stream and self._is_behind(stream, mark)):
                    self.problems.append(f"{op.key} begins before {key} is over")
            yield

    def begins(self):
        super().begins()
        self._begun += 1

    def ended(self, op):
        over = super().ended(op)
        if over is not None:
            self._by_step.setdefault(op.key, {})[self._number()] = self._marks[op.key][1]
        return over

    @contextmanager
    def of(self, step):
        """What the calling thread does is of ``step``."""
        before, self._here.step = getattr(self._here, "step", None), step
        try:
            yield
        finally:
            self._here.step = before

    def _number(self):
        """Which step the calling thread works for, counted as they begin; one step, if it does not say."""
        step = getattr(self._here, "step", None)
        _, number = self._numbers.setdefault(id(step), (step, self._begun))
        return number

    def _needed(self, op):
        """The events of what ``op`` needs: of its own step, and of the newest step before. Later steps may have begun
        the same again meanwhile."""
        number = self._number()
        for key in op.needs:
            yield key, self._by_step.get(key, {}).get(number)
        for key in op.needs_previous:
            before = {other: mark for other, mark in self._by_step.get(key, {}).items() if other < number}
            yield key, before[max(before)] if before else None

    @staticmethod
    def _is_behind(stream, mark):
        return all(stream.clock.get(name, 0) >= count for name, count in mark.clock.items())

    def close(self):
        streams = list(self._streams.values())
        super().close()
        for stream in streams:
            stream.close()
        self._computing = None

    def bring(self, tensor):
        return tensor.clone()

    def take_batch(self, batch):
        return batch

    def take_buffers(self, model):
        pass

    def leave(self, tensors):
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def fetch(self, tensor):
        self._record(self._current_stream()).synchronize()
        return tensor.clone()

    def pin(self, memory):
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        assert address not in self.pinned and address % 4096 == 0
        self.pinned[address] = len(memory)
        self.pins += 1
        return partial(self.pinned.pop, address)

    def _new_stream(self, lane):
        return Stream(lane, self.delay)

    def _current_stream(self):
        if self._computing is None:
            self._computing = Stream("compute", self.delay, computes=True)
        return getattr(self._here, "stream", None) or self._computing

    @contextmanager
    def _on(self, stream):
        before = getattr(self._here, "stream", None)
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def _record(self, stream):
        return stream.record()

    def _empty(self, tensor):
        return torch.empty_like(tensor)

    def _copy(self, target, source):
        target.fill_(float("nan") if target.is_floating_point() else 0x55)
        refs = weakref.ref(target), weakref.ref(source)
        self._current_stream().put(partial(self._make, refs))

    def _make(self, refs):
        target, source = (ref() for ref in refs)
        if target is None or source is None:
            self.problems.append("a copy is made of memory, or to memory, that nobody holds any more")
            return
        with torch.no_grad():
            target.copy_(source)
