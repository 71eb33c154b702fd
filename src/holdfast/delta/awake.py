"""Awake: seconds in which this process was at work, for the deadlines by which it judges others.

A process that was suspended (SIGSTOP, a paused container or virtual machine) finds at its next look that everybody has
been silent for minutes, since it has heard nobody. So time that passes between two looks counts to a limit: whoever
waits looks every tenth of a second. Between rare looks time is counted short, and a deadline that is judged then is
late, never early. Used by every thread that waits for a writer, a replica, or another rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MOST_SECONDS = 2.0
"""That count between two looks."""


class AwakeClock:
    """A clock that stands still while the process is suspended. Any thread may ask it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._looked, self._now = clock(), 0.0

    def now(self) -> float:
        """Return the seconds since the clock was made, without those in which nobody looked."""
        with self._lock:
            looked = self._clock()
            self._now += min(looked - self._looked, MOST_SECONDS)
            self._looked = looked
            return self._now


now = AwakeClock().now
"""The clock of this process."""
