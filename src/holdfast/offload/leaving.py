"""Leaving: a script that ends without ``close``.

Threads that the interpreter ends in the middle of an exchange with other ranks take the process down with them, with a
signal. So what is under way is finished first, as if the script had waited for it.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import Protocol
from weakref import WeakKeyDictionary


class Open(Protocol):
    def wait(self) -> None: ...
    def give_up(self) -> None: ...


_open: WeakKeyDictionary[Open, int] = WeakKeyDictionary()


def finish_at_exit(engine: Open) -> None:
    """When this process ends, and not a fork of it, wait for what ``engine`` has under way, and stop it."""
    _open[engine] = os.getpid()


def closed(engine: Open) -> None:
    """It has been stopped."""
    _open.pop(engine, None)


@atexit.register
def _finish() -> None:
    for engine in [engine for engine, process in _open.items() if process == os.getpid()]:
        with suppress(Exception):  # which the next start finds
            engine.wait()
        with suppress(Exception):
            engine.give_up()
