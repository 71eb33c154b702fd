"""Interrupts: Ctrl-C during a step takes effect between two computations.

Python raises ``KeyboardInterrupt`` anywhere, also while a thread takes a lock that other threads wait for. So while the
engine works on the main thread, the first SIGINT is only noted, and raised at the next safe point. A second one is
raised at once. A handler that the script has installed is left alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
