"""The executor: runs a list of operations as their dependencies allow.

Operations on the compute lane run on the calling thread, in list order. All others start as soon as what
they need is over, each on its lane's own threads; of several that are ready, the earlier in the list has
priority. ``run`` returns when the last computation is over; updates, writes and the commit go on beside the
next step, whose operations wait for exactly those they need.

After a failure nothing new starts, and the error is raised in the caller's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..plan.ops import COMMIT, COMPUTE, UPDATE, Key, Op

Handler = Callable[[Op, Any], "Future | None"]
"""Runs one operation of a step; returns a future if it goes on after the handler has returned."""


@dataclass(eq=False)
class Task:
    """One operation of one step, on its way."""

    op: Op
    step: Any
    priority: int
    missing: int = 0
    over: bool = False
    dependents: list[Task] = field(default_factory=list)
    started: float = 0.0


@dataclass(frozen=True)
class Span:
    """When an operation ran; seconds of ``time.perf_counter``."""

    key: Key
    lane: str
    start: float
    end: float


class Executor:
    """Runs operation lists with one handler per kind of operation."""

    def __init__(self, handlers: dict[str, Handler], update_workers: int, prepare_worker: Callable[[], None]):
        self._handlers = handlers
        self._lanes = {
            UPDATE: ThreadPoolExecutor(update_workers, "holdfast-update", initializer=prepare_worker),
            COMMIT: ThreadPoolExecutor(1, "holdfast-commit"),
        }
        self._changed = threading.Condition()
        self._latest: dict[Key, Task] = {}
        self._running = 0  # asynchronous operations under way
        self._outstanding = 0  # operations admitted and not over
        self._failure: BaseException | None = None
        self.spans: list[Span] | None = None
        """Set to a list to record when every operation ran."""

    def run(self, operations: Sequence[Op], step: Any) -> None:
        """Start ``operations`` and run their computations. Raises the first failure of any lane."""
        tasks = self._admit(operations, step)
        for task in tasks:
            if task.op.lane == COMPUTE:
                self._wait(lambda task=task: task.missing == 0)
                self._execute(task)
                self._raise_failure()

    def drain(self) -> None:
        """Wait until nothing is under way. Raises the first failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0 and (self._failure or self._outstanding == 0))
        self._raise_failure()

    def abort(self) -> None:
        """Start nothing more, and wait for what runs."""
        with self._changed:
            self._failure = self._failure or RuntimeError("the step was given up")
            self._changed.wait_for(lambda: self._running == 0)

    def close(self) -> None:
        """Stop the lanes. Idempotent."""
        for pool in self._lanes.values():
            pool.shutdown(wait=True)

    def _admit(self, operations: Sequence[Op], step: Any) -> list[Task]:
        """Link the operations to what they need, and start those that need nothing."""
        with self._changed:
            self._raise_failure()
            earlier, mine = self._latest, {}
            for priority, op in enumerate(operations):
                task = mine[op.key] = Task(op, step, priority)
                needed = [mine[key] for key in op.needs]
                needed += [earlier[key] for key in op.needs_previous if key in earlier]
                for other in needed:
                    if not other.over:
                        other.dependents.append(task)
                        task.missing += 1
            self._latest = {**earlier, **mine}
            self._outstanding += len(mine)
            ready = [task for task in mine.values() if task.missing == 0 and task.op.lane != COMPUTE]
            self._running += len(ready)
        for task in ready:
            self._dispatch(task)
        return list(mine.values())

    def _dispatch(self, task: Task) -> None:
        """Start an asynchronous operation, already counted as running."""
        pool = self._lanes.get(task.op.lane)
        if pool is None:
            self._start(task)
        else:
            pool.submit(self._start, task)

    def _start(self, task: Task) -> None:
        """Run the handler of an asynchronous operation; never raises."""
        task.started = time.perf_counter()
        try:
            future = self._handlers[task.op.key.kind](task.op, task.step)
        except BaseException as error:
            self._finish(task, error, running=1)
            return
        if future is None:
            self._finish(task, None, running=1)
        else:
            future.add_done_callback(lambda done: self._finish(task, done.exception(), running=1))

    def _execute(self, task: Task) -> None:
        """Run a computation on the calling thread."""
        task.started = time.perf_counter()
        self._handlers[task.op.key.kind](task.op, task.step)
        self._finish(task, None, running=0)

    def _finish(self, task: Task, error: BaseException | None, running: int) -> None:
        if self.spans is not None:
            self.spans.append(Span(task.op.key, task.op.lane, task.started, time.perf_counter()))
        with self._changed:
            ready = []
            if error is not None:
                self._failure = self._failure or error
            else:
                task.over = True
                self._outstanding -= 1
                for other in task.dependents:
                    other.missing -= 1
                    if other.missing == 0 and other.op.lane != COMPUTE:
                        ready.append(other)
            task.dependents = []
            task.step = None
            if self._failure is not None:
                ready = []
            self._running += len(ready) - running
            self._changed.notify_all()
        for other in sorted(ready, key=lambda task: task.priority):
            self._dispatch(other)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or condition())
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def together(futures: Sequence[Future]) -> Future:
    """One future that is done when all are; it fails with the first error."""
    if len(futures) == 1:
        return futures[0]
    done: Future = Future()
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
