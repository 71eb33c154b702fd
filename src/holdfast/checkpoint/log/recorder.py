"""The recorder: the thread that makes finalized steps durable, in order and in groups.

A step is *sealed* when all that it consumed has been copied; from then on it belongs to the recorder. A group is
written when it is full, when its first step has waited for ``MAX_DELAY_SECONDS``, or when a caller waits. After an
error nothing more is written, and every waiting or later caller gets the error. Called by the log backend and by a
replica's server.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from holdfast import failpoints

from ...accelerators import use_device
from ...errors import BadInput, WriterHung
from ...io.threads import use_cpus
from ...optim.torch_threads import keep_torch_threads, one_torch_thread
from ...quantities import PAGE
from ...store.log.journal import JournalWriter, Record
from ...store.run_store import LocalStore
from .. import running_clock
from ..capture.staging_buffers import StagingBuffer, StagingPool

T = TypeVar("T")
BOUND = 8
"""The most steps that may be on their way to the disk."""
MAX_DELAY_SECONDS = 1.0
"""The longest time that a finalized step waits for others."""
NEWEST = 0.1
"""The weight of the newest record in the mean size of records."""


@dataclass
class FinalizedStep:
    """A finalized step: the JSON and the memory of its log record, and the staging buffers of that memory."""

    step: int
    about: dict[str, Any]
    parts: tuple[memoryview, ...]
    slots: tuple[StagingBuffer, ...]
    finish: Callable[[], None] | None = None
    """Completes the record once its data has left the device. Called by the thread that writes or sends the record."""
    late_bytes: int = 0
    """The most bytes that ``finish`` adds to ``parts``."""
    sealed_at: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        """The most bytes that are written, without headers."""
        return sum(map(len, self.parts)) + self.late_bytes

    @property
    def is_late(self) -> bool:
        """Return whether anything of the step may still be on its way from a device."""
        return self.finish is not None or any(slot.is_late for slot in self.slots)

    def complete(self) -> None:
        """Wait until all data of the step has arrived, and complete the record."""
        for slot in self.slots:
            slot.wait_for_copies()
        if self.finish is not None:
            self.finish()


@dataclass
class RecorderTask:
    """Work for the recorder's thread: once every earlier step is durable, or ``at_once`` before any waiting step."""

    do: Callable[[], Any]
    at_once: bool = False


def _as_they_are(about: dict[str, Any], parts: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
    return parts


class InlineRecorder:
    """A stand-in for a ``Recorder`` where no training waits: it does every task at once, in the caller's thread.

    ``heartbeat`` is called from time to time while a snapshot is written.
    """

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.heartbeat = heartbeat

    def put(self, task: RecorderTask) -> None:
        task.do()

    def do(self, what: Callable[[], Any]) -> Any:
        return what()


class Recorder:
    """Writer of finalized steps to ``journal``, ``group`` steps at once.

    ``pool`` gets their staging buffers back. ``pack`` turns the JSON and the parts of a step into the parts that are
    written. The thread runs on ``cpus``, if any are given.
    """

    def __init__(
        self,
        journal: JournalWriter,
        pool: StagingPool,
        *,
        durable_step: int,
        group: int = 1,
        deadline_seconds: float = 300.0,
        pack: Callable[[dict[str, Any], tuple[memoryview, ...]], tuple[memoryview, ...]] = _as_they_are,
        cpus: Collection[int] = (),
    ) -> None:
        self._pack, self._cpus = pack, cpus
        self._journal, self._pool, self.group = journal, pool, group
        self._deadline = deadline_seconds
        self.durable_step = durable_step
        """The newest step whose record, and every one before it, survives power loss."""
        self.header_bytes = 4 * PAGE
        """Approximate bytes of a record's header: those of the largest in the last write."""
        self.record_bytes = 0.0
        """Mean bytes of the last records as they were written, without headers; 0 before there is one."""
        self.written_bytes = 0
        self.write_seconds = 0.0
        self._taken_bytes = 0
        """Bytes of the written records as ``pending_bytes`` counts them: before ``pack``, and with headers."""
        self.last_put = durable_step
        self._waiting: deque[FinalizedStep | RecorderTask] = deque()
        self._at_once: deque[RecorderTask] = deque()
        self._held = False
        self._changed = threading.Condition()
        self._wanted = self._written_step = durable_step
        self._busy_since: float | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._ends_at: float | None = None
        """The time, by the monotonic clock, at which the last write has to end; None if there is no such time."""
        self._rate, self._records_only = 0.0, False
        self.waits_until: Callable[[], float | None] = lambda: None
        """A function that returns the time, by the monotonic clock, after which nobody waits for a staging buffer."""
        keep_torch_threads()
        self._thread = threading.Thread(target=self._work, name="holdfast-recorder", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        self._at_exit = partial(_end_with_process, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def is_alive(self) -> bool:
        """Return whether the thread may still use staging buffers, files and the queue."""
        return self._thread.is_alive()

    @property
    def pending(self) -> int:
        """The number of finalized steps that are not yet written, and of tasks that wait for them."""
        with self._changed:
            return len(self._waiting)

    @property
    def pending_bytes(self) -> int:
        """The most bytes of these steps' records, without headers."""
        with self._changed:
            return sum(item.nbytes for item in self._waiting if isinstance(item, FinalizedStep))

    @property
    def bytes_per_second(self) -> float | None:
        """The rate at which bytes of ``pending_bytes`` became durable; None before a record was written.

        Of records that ``pack`` makes smaller, fewer bytes are written. The rate includes the time that this takes.
        """
        with self._changed:
            return self._taken_bytes / self.write_seconds if self.write_seconds else None

    def left_bytes(self, store: LocalStore) -> int:
        """Return the bytes of the run's cap that may still be written, at most: records may be on their way."""
        assert store.cap_bytes is not None
        # read first: what is written meanwhile must count twice rather than never
        pending = self.pending_bytes + self.pending * self.header_bytes
        free = self._journal.free_bytes
        return store.cap_bytes - (store.used_bytes - free + pending)

    def expect(self, count: int) -> None:
        """Set how many records are needed at once: those from one snapshot to the next."""
        self._journal.records_ahead = count

    def put(self, item: FinalizedStep | RecorderTask) -> None:
        """Hand over a step or a task. Raises the error of an earlier write."""
        with self._changed:
            self._raise_failure()
            if isinstance(item, RecorderTask) and item.at_once:
                self._at_once.append(item)
            else:
                self._waiting.append(item)
            if isinstance(item, FinalizedStep):
                self.last_put = item.step
            self._changed.notify_all()

    def do(self, work: Callable[[], T]) -> T:
        """Have the thread do ``work`` before any waiting step, and return the result. Raises as ``wait`` does."""
        results: list[T] = []
        self.put(RecorderTask(lambda: results.append(work()), at_once=True))
        with self._changed:
            while not results:
                self._check()
                self._changed.wait(0.1)
        return results[0]

    def heartbeat(self) -> None:
        """Restart the deadline, because the running task has made progress. Called by that task."""
        self._busy_since = running_clock.now()

    def hold(self) -> None:
        """Write the steps that follow, but count them as durable only from ``restart`` on.

        The snapshot that they follow is not durable yet. Called while nothing waits.
        """
        with self._changed:
            assert not self._waiting
            self._held = True

    def use(self, pool: StagingPool) -> None:
        """Use the staging buffers of ``pool`` from here on. Called while nothing waits."""
        with self._changed:
            assert not self._waiting
            self._pool = pool

    def leave_out(self, step: int) -> None:
        """Note that ``step`` gets no record, so that the end of the process can name it as not durable.

        Raises the error of an earlier write, and ``WriterHung`` after the deadline.
        """
        self._check()
        with self._changed:
            self.last_put = max(step, self.last_put)

    def restart(self, step: int) -> None:
        """Continue the log after ``step``, which is durable without a record. Called while no earlier step waits."""
        with self._changed:
            self._raise_failure()
            self._held = False
            self._written_step = max(step, self._written_step)
            self.durable_step = self._written_step
            self.last_put = max(step, self.last_put)
            self._changed.notify_all()

    def take_slot(self, wait: bool) -> StagingBuffer | None:
        """Return a staging buffer for the next step; with ``wait``, once one is free. None where the time is over.

        Raises the error of a failed write, ``WriterHung`` after the deadline, and ``BadInput`` if none will ever be
        free.
        """
        slot = self._pool.take()
        while slot is None:
            self._check()
            if not self.pending:
                slot = self._pool.take()
                if slot is None:
                    raise too_many_steps(self._pool.count)
            elif not wait or self._is_over():
                return None
            else:
                self._want(self.last_put)
                slot = self._pool.take(timeout=0.1)
        return slot

    def wait(self, step: int) -> None:
        """Return when ``step``, which has been put, is durable.

        Raises the error of a failed write, and ``WriterHung`` after the deadline.
        """
        self._want(step)
        with self._changed:
            while self.durable_step < step:
                self._check()
                self._changed.wait(0.1)

    def drain(self) -> None:
        """Return when no step or task waits any more. Raises as ``wait`` does."""
        self._want(self.last_put)
        with self._changed:
            while self._waiting or self._at_once:
                self._check()
                self._changed.wait(0.1)

    def write_until(self, ends_at: float, bytes_per_second: float, records_only: bool) -> None:
        """Have ``close`` begin no write that would end after ``ends_at`` (monotonic) at a rate of ``pending_bytes``.

        With ``records_only`` tasks are left out, too. Nothing is left out before steps that are written, and a step
        that is left out is never durable.
        """
        with self._changed:
            self._ends_at, self._rate, self._records_only = ends_at, bytes_per_second, records_only
            self._changed.notify_all()

    def close(self) -> None:
        """Write what waits, unless writing has failed, and end the thread.

        Raises the error of a failed write. Raises ``WriterHung``, and leaves the thread, if that hangs.
        """
        atexit.unregister(self._at_exit)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self._hung():
                self._check()
            if self._ends_at is not None and time.monotonic() > self._ends_at:
                return  # the write under way is not acknowledged, and ends with the process
        self._journal.close()
        self._raise_failure()

    def end_with_process(self) -> None:
        """Close at the end of a process that did not call ``close``, and report steps that are not durable.

        Does nothing in a fork.
        """
        if os.getpid() != self._process:
            return
        why = "they follow a base that is not there yet"
        try:
            self.close()
        except Exception as error:
            why = str(error)
        if self.durable_step < self.last_put:
            print(  # not through a logger, whose level may hide it
                f"holdfast: the script ended without close(), and of its steps to {self.last_put} those after"
                f" {self.durable_step} are not durable: {why}",
                file=sys.stderr,
            )

    def _want(self, step: int) -> None:
        with self._changed:
            self._wanted = max(self._wanted, step)
            self._changed.notify_all()

    def _check(self) -> None:
        self._raise_failure()
        if self._hung():
            raise writer_hung("nothing has been written", self._deadline, self.durable_step)

    def _is_over(self) -> bool:
        end = self.waits_until()
        return end is not None and time.monotonic() > end

    def _hung(self) -> bool:
        since = self._busy_since
        return since is not None and running_clock.now() - since > self._deadline

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        one_torch_thread()
        use_cpus(self._cpus)
        for device in self._pool.devices[:1]:
            use_device(device)
        while True:
            with self._changed:
                group = self._next_group()
                if not group:
                    return
                self._busy_since = running_clock.now()
            try:
                self._do(group)
            except BaseException as error:
                with self._changed:
                    self._failure, self._busy_since = error, None
                    self._changed.notify_all()
                return

    def _next_group(self) -> list[FinalizedStep] | RecorderTask | None:
        """Wait for the next work and return it; None at the end. Called with the lock."""
        while True:
            if self._ends_at is not None:
                return self._in_time(self._ends_at - time.monotonic())
            if self._at_once:
                return self._at_once[0]
            steps: list[FinalizedStep] = []
            for item in self._waiting:
                if isinstance(item, RecorderTask):
                    if not steps:
                        return item
                    break
                steps.append(item)
            if steps:
                left = steps[0].sealed_at + MAX_DELAY_SECONDS - time.monotonic()
                wanted = self._wanted >= steps[0].step or len(steps) < len(self._waiting)
                if len(steps) >= self.group or wanted or left <= 0 or self._closing:
                    return steps[: self.group]
                self._changed.wait(left)
            elif self._closing:
                return None
            else:
                self._changed.wait()

    def _in_time(self, seconds: float) -> list[FinalizedStep] | RecorderTask | None:
        """Return the next work that ends in ``seconds``, as far as is known; None if there is none.

        Called with the lock.
        """
        if self._records_only or seconds <= 0:
            self._at_once.clear()
            self._waiting = deque(item for item in self._waiting if isinstance(item, FinalizedStep))
        if self._at_once:
            return self._at_once[0]
        steps: list[FinalizedStep] = []
        room = seconds * self._rate
        for item in self._waiting:
            if isinstance(item, RecorderTask):
                return steps or item
            room -= item.nbytes + self.header_bytes
            if room < 0 or len(steps) == self.group:
                break
            steps.append(item)
        return steps or None

    def _do(self, group: list[FinalizedStep] | RecorderTask) -> None:
        steps = [] if isinstance(group, RecorderTask) else group
        records: list[Record] = []
        taken = sum(sealed.nbytes for sealed in steps)
        started = time.perf_counter()
        if isinstance(group, RecorderTask):
            group.do()
        else:
            for sealed in steps:
                sealed.complete()
            records = [
                Record(sealed.step, sealed.about, self._pack(sealed.about, sealed.parts)) for sealed in steps
            ]
            failpoints.reach("before_records_write")
            self.header_bytes = self._journal.append(records, self.heartbeat)
        self._pool.give([slot for sealed in steps for slot in sealed.slots])
        with self._changed:  # a caller that finds nothing waiting may free the buffers
            done = self._at_once if isinstance(group, RecorderTask) and group.at_once else self._waiting
            for _ in steps or [group]:
                done.popleft()
            if steps:
                self._written_step = steps[-1].step
                self.durable_step = self.durable_step if self._held else self._written_step
                for record in records:
                    nbytes = sum(map(len, record.parts))
                    self.written_bytes += nbytes
                    self.record_bytes += (nbytes - self.record_bytes) * (NEWEST if self.record_bytes else 1.0)
                self._taken_bytes += taken + len(steps) * self.header_bytes
                self.write_seconds += time.perf_counter() - started
            self._busy_since = None
            self._changed.notify_all()


def _end_with_process(recorder: weakref.ref[Recorder]) -> None:
    """Close the recorder. Called when the interpreter ends, before it stops the threads."""
    there = recorder()
    if there is not None:
        there.end_with_process()


def too_many_steps(num_buffers: int) -> BadInput:
    """Return the error for more optimizer steps in one iteration than there are staging buffers."""
    return BadInput(
        f"{num_buffers} optimizer steps were done since step() was called last, and there is no room for more in one"
        f" iteration. Call step() after every optimizer step, or give more memory=, which allows up to {BOUND}."
    )


def writer_hung(what: str, seconds: float, durable_step: int) -> WriterHung:
    """Return the error of a writer without progress: ``what`` has held for ``seconds``."""
    return WriterHung(
        f"{what} for {seconds:.0f} s. Step {durable_step} is durable, later ones are not. Check the device that the run"
        " is on, and resume in a new process."
    )
