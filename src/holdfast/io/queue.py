"""The I/O queue of a run: all of its transfers, by priority, on a few threads for each drive.

A group is a list of requests with one future. Groups go by (priority, arrival), their requests in order. Reads and
writes are two lanes over the same threads, and neither may take the last thread, so a read that somebody waits for
never queues behind a throttled or syncing writer. Bytes in flight are bounded by threads x request size.
``DriveQueues`` has a queue for each of several drives, so that a slow drive holds up no other. Used by the store for
payload files, logs and scratch. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import QueueClosed
from holdfast.quantities import MiB

REQUEST_BYTES = 4 * MiB
"""The most bytes that one request moves, and so the granularity of priorities."""


class IOQueue:
    """Moves bytes on ``threads`` threads. Safe to use from several threads; ``close`` it at the end."""

    def __init__(
        self,
        threads: int = 4,
        read_limit: int | None = None,
        write_limit: int | None = None,
        total_limit: int | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads, each of which calls ``prepare`` first.

        Limits are bytes per second. ``total_limit`` is shared by reads and writes, as a device's is.
        """
        self._lanes = {False: _Lane(), True: _Lane()}
        self._throttles = {False: Throttle(read_limit), True: Throttle(write_limit)}
        self._total = Throttle(total_limit)
        self._lane_cap = max(1, threads - 1)
        self._counters: Counter[tuple[str, str, str]] = Counter()
        self._wake = threading.Condition()
        self._arrivals = self._idle = 0
        self._closed = False
        self._prepare = prepare
        self._threads = [
            threading.Thread(target=self._work, name=f"holdfast-io-{index}", daemon=True)
            for index in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # such as KeyboardInterrupt
            self.close()
            raise

    def submit(
        self,
        requests: Sequence[Request],
        *,
        kind: str,
        phase: str,
        priority: int,
        finish: Callable[[], Any] | None = None,
    ) -> Future:
        """Queue ``requests`` (all reads or all writes) as one group; a smaller ``priority`` goes first.

        The future is done when no request uses its memory any more. Its result is that of ``finish``, which runs on
        an I/O thread after the last request. Its exception is the first one, after which the rest of the group is
        dropped. ``Future.cancel`` works until the first request has begun. Raises ``QueueClosed`` after ``close``.
        """
        write = requests[0].write if requests else True
        if any(request.write != write for request in requests):
            raise ValueError("a group is either all reads or all writes")
        group = _Group(requests, kind, phase, finish)
        with self._wake:
            if self._closed:
                raise QueueClosed("the I/O queue is closed; nothing can be read or written through it")
            self._arrivals += 1
            heapq.heappush(self._lanes[write].heap, (priority, self._arrivals, group))
            self._wake.notify(max(1, len(requests)))
        return group.future

    def counters(self) -> dict[tuple[str, str, str], int]:
        """Return the bytes that really moved, by ("read" or "write", kind, phase)."""
        with self._wake:
            return dict(self._counters)

    def close(self) -> None:
        """Finish the transfers under way, fail the waiting ones with ``QueueClosed``, and join the threads."""
        with self._wake:
            self._closed = True
            waiting = [item[2] for lane in self._lanes.values() for item in lane.heap]
            for lane in self._lanes.values():
                lane.heap.clear()
            dropped = [group for group in waiting if self._drop(group)]
            self._wake.notify_all()
        for group in dropped:
            self._fail(group)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join()

    def _drop(self, group: _Group) -> bool:
        """Fail ``group`` as closed. Return True if nothing of it is under way, so that it ends now."""
        group.error = group.error or QueueClosed("the I/O queue was closed before this transfer was done")
        return group.active == 0

    @staticmethod
    def _fail(group: _Group) -> None:
        assert group.error is not None
        if group.started or group.future.set_running_or_notify_cancel():
            group.future.set_exception(group.error)

    def _work(self) -> None:
        """Run one thread: move the most urgent request that may run, and end its group after the last one."""
        self._prepare()
        while True:
            with self._wake:
                while (taken := self._take()) is None:
                    if self._closed:
                        return
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                write, group, request = taken
                if self._idle and (self._lanes[False].heap or self._lanes[True].heap):
                    self._wake.notify()
            error = self._move(write, group, request) if request is not None else None
            with self._wake:
                group.active -= 1
                group.error = group.error or error
                ended = group.active == 0 and (group.error is not None or group.next >= len(group.requests))
                if ended:
                    group.active = 1  # keeps other threads from ending it
            if ended:
                self._end(group)
            with self._wake:
                self._lanes[write].workers -= 1

    def _take(self) -> tuple[bool, _Group, Request | None] | None:
        """Return the next request with its lane, or None if nothing may run. Call it with the lock held."""
        while True:
            open_lanes = [
                (lane.heap[0][:2], write)
                for write, lane in self._lanes.items()
                if lane.heap and lane.workers < self._lane_cap
            ]
            if not open_lanes:
                return None
            write = min(open_lanes)[1]
            lane = self._lanes[write]
            group = lane.heap[0][2]
            if group.error is None and not group.started:
                group.started = group.future.set_running_or_notify_cancel()
            if group.error is not None or not group.started:  # failed or cancelled meanwhile
                heapq.heappop(lane.heap)
                continue
            request = group.requests[group.next] if group.requests else None
            group.next += 1
            group.active += 1
            if group.next >= len(group.requests):
                heapq.heappop(lane.heap)
            lane.workers += 1
            return write, group, request

    def _move(self, write: bool, group: _Group, request: Request) -> BaseException | None:
        """Do one transfer and return its error, if any."""
        try:
            if write and request.before is not None:
                request.before()
            self._transfer(write, group, request)
            if not write and request.after is not None:
                request.after()
        except BaseException as error:
            return error
        return None

    def _transfer(self, write: bool, group: _Group, request: Request) -> None:
        throttle, nbytes = self._throttles[write], len(request.view)
        until, until_total = throttle.reserve(nbytes), self._total.reserve(nbytes)
        (request.file.write if write else request.file.read)(request.view, request.offset)
        throttle.wait(until)
        self._total.wait(until_total)
        with self._wake:
            self._counters["write" if write else "read", group.kind, group.phase] += nbytes

    @staticmethod
    def _end(group: _Group) -> None:
        """Set the result of the group's future. Called once, by the thread that did the last request."""
        result = None
        if group.error is None:
            try:
                result = group.finish() if group.finish is not None else None
            except BaseException as error:
                group.error = error
        if group.error is not None:
            group.future.set_exception(group.error)
        else:
            group.future.set_result(result)


class DriveQueues(IOQueue):
    """The queue of a run's own drive, and one queue for each of ``directories``, which are on other drives."""

    def __init__(
        self,
        directories: Sequence[Path],
        threads: int = 4,
        read_limit: int | None = None,
        write_limit: int | None = None,
        total_limit: int | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the queues. The arguments of ``IOQueue`` hold for each drive."""
        super().__init__(threads, read_limit, write_limit, total_limit, prepare)
        self._another = partial(IOQueue, threads, read_limit, write_limit, total_limit, prepare)
        self.others: dict[Path, IOQueue] = {}
        self.add(directories)

    def add(self, directories: Sequence[Path]) -> None:
        """Start a queue for each of ``directories``, before any file there is used."""
        for directory in directories:
            if directory not in self.others:
                self.others[directory] = self._another()

    def submit(
        self,
        requests: Sequence[Request],
        *,
        kind: str,
        phase: str,
        priority: int,
        finish: Callable[[], Any] | None = None,
    ) -> Future:
        """Queue ``requests`` as ``IOQueue.submit`` does. The files of one group must be on one drive."""
        path = getattr(requests[0].file, "path", None) if requests else None
        queue = None if path is None else self.others.get(path.parent)
        submit = super().submit if queue is None else queue.submit
        return submit(requests, kind=kind, phase=phase, priority=priority, finish=finish)

    def counters(self) -> dict[tuple[str, str, str], int]:
        """Return the bytes that moved on all drives together."""
        total: Counter[tuple[str, str, str]] = Counter(super().counters())
        for queue in self.others.values():
            total.update(queue.counters())
        return dict(total)

    def close(self) -> None:
        super().close()
        for queue in self.others.values():
            queue.close()


@dataclass(frozen=True, slots=True)
class Request:
    """One transfer.

    ``before`` runs on the I/O thread before a write, ``after`` runs there after a read is complete.
    """

    file: ReadWrite
    view: memoryview
    offset: int
    write: bool
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


class ReadWrite(Protocol):
    """The operations that a request needs of a file."""

    def read(self, view: memoryview, offset: int) -> None: ...
    def write(self, view: memoryview, offset: int) -> None: ...


class Throttle:
    """A limit of ``bytes_per_second`` (None: unlimited), as a token bucket of one request's size."""

    def __init__(
        self,
        bytes_per_second: int | None,
        *,
        burst_bytes: int = REQUEST_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._burst_seconds = burst_bytes / bytes_per_second if bytes_per_second else 0.0
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """Reserve the device for ``nbytes`` and return the time at which it will be done with them."""
        if self.bytes_per_second is None:
            return 0.0
        with self._lock:
            start = max(self._free_at, self._clock() - self._burst_seconds)
            self._free_at = start + nbytes / self.bytes_per_second
            return self._free_at

    def wait(self, until: float) -> None:
        """Sleep until the time ``until``, which ``reserve`` returned."""
        if self.bytes_per_second is not None and (seconds := until - self._clock()) > 0:
            self._sleep(seconds)


@dataclass(eq=False, slots=True)
class _Group:
    requests: Sequence[Request]
    kind: str
    phase: str
    finish: Callable[[], Any] | None
    future: Future = field(default_factory=Future)
    next: int = 0
    active: int = 0
    started: bool = False
    error: BaseException | None = None


class _Lane:
    """The waiting groups of one direction, and the number of threads that work for it."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, _Group]] = []
        self.workers = 0
