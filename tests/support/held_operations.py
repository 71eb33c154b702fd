"""Operations of an engine that end no sooner than a test says: what a slow disk makes likely becomes certain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

from holdfast.offload.ops import KINDS
from holdfast.schedule.work import delayed_blocks

PATIENCE_SECONDS = 60.0


def delayed(run, op, step) -> bool:
    """Whether an update is delayed: the others must not be held, since backward passes wait for their buffers."""
    return delayed_blocks(step.shape, len(run.blocks))[op.key.block]


class Held:
    """Holds operations of ``kind`` for which ``held(run, op, step)`` is true, in engines that are built from now on.

    No thread waits for them. Enter it inside of the engine, whose end needs all to be released.
    """

    def __init__(self, monkeypatch, kind: str, held: Callable[..., bool] = delayed) -> None:
        self.waiting: list[tuple[int, Future, Callable[[], Any]]] = []
        """Step, end and handler of each operation whose turn has come and that is held."""
        self.steps: set[int] = set()
        """Steps that had such operations, held or released before their turn came."""
        self._released: float = -1
        self._lock = threading.Lock()
        real = KINDS[kind]

        def handle(run, op, step):
            if held(run, op, step):
                with self._lock:
                    self.steps.add(step.number)
                    if step.number > self._released:
                        done: Future = Future()
                        self.waiting.append((step.number, done, partial(real, run, op, step)))
                        return done
            return real(run, op, step)

        monkeypatch.setitem(KINDS, kind, handle)

    def release(self, step: float) -> None:
        """Do what is held up to ``step``, and hold nothing more of these steps."""
        with self._lock:
            self._released = max(self._released, step)
            due = [each for each in self.waiting if each[0] <= step]
            self.waiting = [each for each in self.waiting if each[0] > step]
        for _, done, handler in due:
            try:
                under_way = handler()
            except BaseException as error:
                done.set_exception(error)
                continue
            if under_way is None:
                done.set_result(None)
            else:
                under_way.add_done_callback(partial(_end_with, done))

    @contextmanager
    def released_by_who_waits(self, engine) -> Iterator[None]:
        """Release the steps that were returned once nothing but what is held is under way, and somebody waits for it.

        Without such a wait they are released at the end.
        """
        executor, returned, stuck = engine._executor, engine.steps_done - 1, threading.Event()
        wait_for = executor._changed.wait_for

        def watched(predicate, timeout=None):
            def look():
                over = predicate()
                if not over and self.waiting and len(executor._running) == len(self.waiting):
                    stuck.set()
                return over

            return wait_for(look, timeout)

        def wait():
            stuck.wait(PATIENCE_SECONDS)
            self.release(returned)

        thread = threading.Thread(target=wait, name="release")
        thread.start()
        executor._changed.wait_for = watched
        try:
            yield
        finally:
            del executor._changed.wait_for
            stuck.set()
            thread.join()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release(inf)


def _end_with(done: Future, other: Future) -> None:
    error = other.exception()
    if error is None:
        done.set_result(other.result())
    else:
        done.set_exception(error)
