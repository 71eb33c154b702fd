"""A clock of the seconds in which this process ran, for deadlines by which it judges others.

A process that was suspended (SIGSTOP, a paused container or virtual machine) finds on waking that everybody has been
silent for minutes. So time between two readings counts only up to a limit; waiting threads read the clock every tenth
of a second. Between rare readings time is counted short, so a deadline judged then is late, never early. Used by every
thread that waits for a writer, a replica, or another rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MOST_SECONDS = 2.0
"""The most seconds that count between two readings."""


class RunningClock:
    """A clock that stands still while the process is suspended. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._looked, self._now = clock(), 0.0

    def now(self) -> float:
        """Return the seconds since the clock was made, less long gaps between readings."""
        with self._lock:
            looked = self._clock()
            self._now += min(looked - self._looked, MOST_SECONDS)
            self._looked = looked
            return self._now


now = RunningClock().now
"""The clock of this process."""
