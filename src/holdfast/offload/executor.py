"""The executor, which runs a list of operations as their dependencies allow.

Operations on the compute lane run on the calling thread, in list order. All others start as soon as the operations that
they need are over, each on its lane's own threads. Of several that are ready, the earlier in the list has priority.
``run`` returns when the last computation is over. Updates, writes and the commit continue beside the next step, whose
operations wait for exactly those that they need.

On a separate device, an operation of the pairs of lanes in ``ahead`` is started as soon as the operations that it needs
have been started, because it waits for them on the device. All others wait until what they need is over. The first need
of a computation is the computation before it; the first need of a download is the computation whose result it brings.
Their other needs are for memory, which is free when the operation that holds it is over. ``run`` returns when the last
computation has been started.

Exchanges between ranks also run in list order, on a thread of their own, step after step. All ranks run the same lists,
so all reach the same exchange, and the first operation that is not over anywhere can always proceed.

After a failure nothing new starts, and the error is raised in the caller's thread. An error of a computation is the
model's: its step is given up, and what earlier steps still have to write is finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from ..optim.torch_threads import Lane
from ..schedule.operations import COMMIT, COMPUTE, DOWNLOAD, EXCHANGE, UPDATE, Key, Op

Handler = Callable[[Op, Any], "Future | None"]
"""Runs one operation of a step; returns a future if the operation continues after the handler has returned."""


@dataclass(eq=False)
class Task:
    """One operation of one step, from admission to its end."""

    op: Op
    step: Any
    priority: int
    missing: int = 0
    begun: bool = False
    """True if the handler has returned and the operation still runs."""
    over: bool = False
    dropped: bool = False
    """True if the operation's step was given up, so that it will not start any more."""
    thread: int | None = None
    """The thread that runs the handler, until the handler has returned."""
    dependents: list[Task] = field(default_factory=list)
    followers: list[Task] = field(default_factory=list)
    """The tasks that need this one and wait for it on the device."""
    started: float = 0.0


@dataclass(frozen=True)
class Span:
    """The time during which an operation ran, in seconds of ``time.perf_counter``."""

    key: Key
    lane: str
    start: float
    end: float
    nbytes: int = 0
    step: int = -1
    """Number of the training step, counted from 0; -1 outside training steps."""


def _same_on_device(one: Sequence[Op], other: Sequence[Op]) -> bool:
    """Return whether two lists have the same computations and downloads, as steps with and without a commit have."""
    if one is other:
        return True
    keys = [[op.key for op in each if op.lane in (COMPUTE, DOWNLOAD)] for each in (one, other)]
    return keys[0] == keys[1]


class Executor:
    """Runs operation lists with one handler per kind of operation."""

    def __init__(
        self,
        handlers: dict[str, Handler],
        update_workers: int,
        prepare_worker: Callable[[], object],
        ahead: frozenset[tuple[str, str]] = frozenset(),
        exchanges: bool = False,
    ) -> None:
        """Start the lanes' threads. ``exchanges`` tells whether there are other ranks."""
        self._handlers, self._ahead = handlers, ahead
        self._on_device = {lane for pair in ahead for lane in pair}
        self._last_end: dict[str, float] = {}
        """End time of the newest operation of each device lane, whose operations run one after another."""
        self._lanes = {
            UPDATE: Lane(update_workers, "holdfast-update", prepare_worker),
            COMMIT: Lane(1, "holdfast-commit", prepare_worker),
            EXCHANGE: Lane(1 if exchanges else 0, "holdfast-exchange", prepare_worker),
        }
        self._exchanged: Task | None = None
        self._changed = threading.Condition()
        self._listed: Sequence[Op] = ()
        self._latest: dict[Key, Task] = {}
        self._running: set[Task] = set()  # asynchronous operations under way
        self._left: set[Task] = set()  # operations admitted, neither over nor dropped
        self._computation_failed = False
        self._failure: BaseException | None = None
        self.safe_point: Callable[[], None] = lambda: None
        """Function called between computations and while they wait; it may raise."""
        self.spans: list[Span] | None = None
        """Set to a list to record when every operation ran."""

    def run(self, operations: Sequence[Op], step: Any) -> None:
        """Start ``operations`` and run their computations. Raises the first failure of any lane."""
        tasks = self._admit(operations, step)
        for task in tasks:
            if task.op.lane == COMPUTE:
                self._wait_for(task)
                try:
                    self._execute(task)
                except Exception:
                    self._drop(tasks)
                    raise
                self._raise_failure()
                self.safe_point()

    def drain(self) -> None:
        """Wait until nothing is under way. Raises the first failure."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running and (self._failure or not self._left))
        self._raise_failure()

    def recover(self) -> None:
        """Finish everything before a failed computation, and be ready for another step.

        Only for a step that nothing else depends on. Raises the first failure of another lane.
        """
        self.drain()
        with self._changed:
            self._latest, self._computation_failed = {}, False

    def abort(self) -> None:
        """Start nothing more, and wait for what runs.

        An operation that the calling thread itself was running has been interrupted by the error that leads here. If a
        computation failed, earlier steps are finished first.
        """
        with self._changed:
            if self._computation_failed:
                self._changed.wait_for(lambda: self._failure is not None or not self._left)
            self._failure = self._failure or RuntimeError("the step was given up")
            self._running = {task for task in self._running if task.thread != threading.get_ident()}
            self._changed.wait_for(lambda: not self._running)

    def close(self) -> None:
        """Stop the lanes. A second call does nothing."""
        for lane in self._lanes.values():
            lane.close()

    def _admit(self, operations: Sequence[Op], step: Any) -> list[Task]:
        """Link the operations to those that they need, and start those that need nothing."""
        with self._changed:
            self._raise_failure()
            earlier, mine = self._latest, {}
            held = [] if _same_on_device(operations, self._listed) else self._downloads()
            self._listed = operations
            for priority, op in enumerate(operations):
                task = mine[op.key] = Task(op, step, priority)
                needed = [mine[key] for key in op.needs]
                if op.lane == COMPUTE:
                    needed, held = [*needed, *held], []
                needed += [earlier[key] for key in op.needs_previous if key in earlier]
                if op.lane == EXCHANGE:
                    needed += [] if self._exchanged is None else [self._exchanged]
                    self._exchanged = task
                for other in needed:
                    follows = bool(self._ahead) and self._follows(task, other)
                    if not (other.over or (follows and other.begun)):
                        (other.followers if follows else other.dependents).append(task)
                        task.missing += 1
            self._latest = {**earlier, **mine}
            self._left.update(mine.values())
            ready = [task for task in mine.values() if task.missing == 0 and task.op.lane != COMPUTE]
        self._dispatch(ready)
        return list(mine.values())

    def _downloads(self) -> list[Task]:
        """Return the downloads that are not over.

        The first computation of a list with other device operations waits for them: ``needs_previous`` counts the
        buffers on the device only from one step to the next of the same kind.
        """
        return [task for task in self._left if task.op.lane == DOWNLOAD]

    def _follows(self, task: Task, other: Task) -> bool:
        """Return whether ``task`` waits on the device for ``other``, which it needs."""
        first = task.op.needs[0] if task.op.needs else None
        in_order = other.op.lane != COMPUTE or other.op.key == first
        return in_order and (other.op.lane, task.op.lane) in self._ahead

    def _dispatch(self, ready: list[Task]) -> None:
        """Start asynchronous operations on their lane's threads, or on the calling thread if their handlers only
        submit."""
        inline = []
        for task in ready:
            lane = self._lanes.get(task.op.lane)
            if lane is None:
                inline.append(task)
            else:
                lane.put(partial(self._start, task))
        for task in inline:
            self._start(task)

    def _start(self, task: Task) -> None:
        """Run the handler of an asynchronous operation, unless something has failed. Never raises."""
        try:
            with self._changed:
                if self._failure is not None or task.dropped:
                    return
                task.thread, task.started = threading.get_ident(), time.perf_counter()
                self._running.add(task)
            future = self._handlers[task.op.key.kind](task.op, task.step)
            if future is not None:
                self._goes_on(task, future)
                return
        except BaseException as error:
            self._finish(task, error)
            return
        self._finish(task, None)

    def _execute(self, task: Task) -> None:
        """Run a computation on the calling thread."""
        task.started = time.perf_counter()
        future = self._handlers[task.op.key.kind](task.op, task.step)
        if future is None:
            self._finish(task, None)
            return
        with self._changed:
            self._running.add(task)
        self._goes_on(task, future)

    def _goes_on(self, task: Task, future: Future) -> None:
        """Note that the handler has returned, and that the operation ends when ``future`` is done."""
        ready: list[Task] = []
        if task.op.lane in self._on_device:
            with self._changed:
                task.begun = True
                ready = self._released(task.followers)
                self._changed.notify_all()
        future.add_done_callback(lambda done: self._finish(task, done.exception()))
        task.thread = None
        if ready:
            self._dispatch(ready)

    def _released(self, waiting: list[Task]) -> list[Task]:
        """Count down what each task in ``waiting`` still misses, and empty the list.

        Returns the tasks that can start now, except computations.
        """
        ready = []
        for other in waiting:
            other.missing -= 1
            if other.missing == 0 and other.op.lane != COMPUTE:
                ready.append(other)
        waiting.clear()
        return sorted(ready, key=attrgetter("priority"))

    def _drop(self, tasks: list[Task]) -> None:
        """Drop the tasks of a step in which a computation failed, so that none of them starts."""
        with self._changed:
            self._computation_failed = True
            self._left.difference_update(tasks)
            for task in tasks:
                task.dropped = True

    def _finish(self, task: Task, error: BaseException | None) -> None:
        started, ended = task.started, time.perf_counter()
        if task.begun:  # it began on the device when the operation before it was over
            started = max(started, self._last_end.get(task.op.lane, 0.0))
            self._last_end[task.op.lane] = ended
        spans = self.spans  # another thread may remove the list meanwhile
        if spans is not None:
            number = getattr(task.step, "number", -1)
            idle = task.op.redo and not task.step.redone
            moved = 0 if idle else task.op.nbytes
            spans.append(Span(task.op.key, task.op.lane, started, ended, moved, number))
        with self._changed:
            ready = []
            if error is not None:
                self._failure = self._failure or error
            else:
                task.over = True
                self._left.discard(task)
                ready = self._released([*task.followers, *task.dependents])
            task.followers, task.dependents = [], []
            task.step = None
            self._running.discard(task)
            self._changed.notify_all()
        if ready:
            self._dispatch(ready)

    def _wait_for(self, task: Task) -> None:
        """Wait until no operation that ``task`` needs is missing."""
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._failure is not None or task.missing == 0, timeout=0.2
            ):
                self.safe_point()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def together(futures: Sequence[Future]) -> Future:
    """Return a future that is done when all ``futures`` are; it fails with the first error."""
    if len(futures) == 1:
        return futures[0]
    done: Future = Future()
    if not futures:
        done.set_result(None)
    lock, missing = threading.Lock(), [len(futures)]
    errors: list[BaseException] = []

    def one_done(future: Future) -> None:
        error = future.exception()
        with lock:
            if error is not None:
                errors.append(error)
            missing[0] -= 1
            if missing[0]:
                return
        if errors:
            done.set_exception(errors[0])
        else:
            done.set_result(None)

    for future in futures:
        future.add_done_callback(one_done)
    return done
