"""The end of a process in the middle of a step: at exit without ``close``, and at Ctrl-C.

If the interpreter ends threads in the middle of an exchange with other ranks, the whole process is killed by a signal.
So what is under way is finished first, as if the script had waited for it. Python raises ``KeyboardInterrupt``
anywhere, also while a thread takes a lock that other threads wait for. So while the engine works on the main thread,
the first SIGINT is only noted, and raised at the next safe point; a second one is raised at once. A handler that the
script has installed is left alone. Called by the engine, and while folders of models are loaded.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol


class OpenEngine(Protocol):
    def wait(self) -> None: ...
    def give_up(self) -> None: ...


_open: dict[OpenEngine, int] = {}
"""The engines that are not closed, each with the process that made it: also those that no variable names any more."""


def finish_at_exit(engine: OpenEngine) -> None:
    """Wait for ``engine`` and stop it when this process ends (not when a fork of it ends)."""
    _open[engine] = os.getpid()


def closed(engine: OpenEngine) -> None:
    """Remove ``engine`` from the exit hook, because it has been stopped."""
    _open.pop(engine, None)


@atexit.register
def _finish() -> None:
    for engine in [engine for engine, process in _open.items() if process == os.getpid()]:
        with suppress(Exception):  # the next start detects the failure
            engine.wait()
        with suppress(Exception):
            engine.give_up()


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Yield a function to call at safe points, which raises ``KeyboardInterrupt`` after a SIGINT."""
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
