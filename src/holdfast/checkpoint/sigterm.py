"""The handling of SIGTERM, which a cluster scheduler sends some time before it takes the machine away.

The handler only notes the signal, because it may arrive inside any statement; ``Checkpointer`` asks at the end of each
step and then makes the step durable. A second SIGTERM ends the process at once. Where the script has a handler of its
own, nothing is watched.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Self


class SigTerm:
    """A watcher that notes the first SIGTERM. A second one ends the process at once."""

    def __init__(self) -> None:
        self.arrived = False
        self.arrived_at: float | None = None
        """The time of the signal, in seconds of the monotonic clock."""
        self._over = False
        self._process = os.getpid()

    @classmethod
    def watched(cls) -> Self | None:
        """Return an active watcher; None where the script has its own handler, or outside the main thread.

        The handler of a watcher that is over is not the script's.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        handler = signal.getsignal(signal.SIGTERM)
        before = getattr(handler, "__self__", None)
        if handler is not signal.SIG_DFL and not (isinstance(before, cls) and before._over):
            return None
        self = cls()
        signal.signal(signal.SIGTERM, self._note)
        return self

    def restore(self) -> None:
        """Stop watching, unless the script has set another handler meanwhile.

        Where the handler stays (on another thread, or set again later by a library that had saved it), a SIGTERM ends
        the process as it would without it.
        """
        self._over = True
        main = threading.current_thread() is threading.main_thread()  # only that thread may set handlers
        if main and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.arrived, self.arrived_at = True, time.monotonic()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._over or os.getpid() != self._process:  # or a forked child, which nothing else would end
            signal.raise_signal(signal.SIGTERM)
