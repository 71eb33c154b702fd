"""Interrupts: a key press during a step takes effect between two computations.

Python raises ``KeyboardInterrupt`` anywhere, also half way through taking a lock that other threads wait for. So
while the engine works on the main thread, the first SIGINT is only noted, and raised at the next safe point;
a second one is raised at once. Whoever has installed a handler of their own is left alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Gives a function to call at safe points: it raises ``KeyboardInterrupt`` if a key was pressed."""
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
