"""Exit hook for a script that ends without ``close``.

If the interpreter ends threads in the middle of an exchange with other ranks, the whole process is killed by a signal.
So what is under way is finished first, as if the script had waited for it.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import Protocol
from weakref import WeakKeyDictionary


class OpenEngine(Protocol):
    def wait(self) -> None: ...
    def give_up(self) -> None: ...


_open: WeakKeyDictionary[OpenEngine, int] = WeakKeyDictionary()


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
