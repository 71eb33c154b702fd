"""The lines of steps in the event log, at most one a second.

Lines are so rare that short steps cost nothing. Without an event log, nothing is computed. Seconds, bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...events import EventLog

SECONDS_BETWEEN_LINES = 1.0
Standing = Callable[[], dict[str, Any]]
"""Returns further fields of a line; its ``written_bytes`` counts since the run was opened."""


class StepLog:
    """The writer of step lines."""

    def __init__(self, events: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._due = float("-inf")
        self._step = self._num_steps = self._written = 0
        self._seconds = self._stall = self._longest_stall = 0.0

    def stepped(self, step: int, seconds: float, stall: float, standing: Standing) -> None:
        """Count ``step``, done ``seconds`` after the one before, with ``stall`` seconds spent on keeping it."""
        if self._events.path is None:
            return
        self._step, self._num_steps = step, self._num_steps + 1
        self._seconds += seconds
        self._stall += stall
        self._longest_stall = max(self._longest_stall, stall)
        if self._clock() >= self._due:
            self._tell(standing())

    def end(self, step: int, standing: Standing) -> None:
        """Write the last line, for a run that is closed after ``step``."""
        if self._events.path is None:
            return
        now = standing()
        if self._num_steps:
            self._tell(now)
        self._events.emit("closed", step=step, **now)

    def _tell(self, now: dict[str, Any]) -> None:
        """Write one line for the steps since the last line, with mean times."""
        count, self._num_steps = self._num_steps, 0
        self._due = self._clock() + SECONDS_BETWEEN_LINES
        if "written_bytes" in now:
            before, self._written = self._written, now["written_bytes"]
            now = now | {"written_bytes": self._written - before}
        self._events.emit(
            "step", step=self._step, steps=count, seconds=self._seconds / count, stall_seconds=self._stall / count,
            longest_stall_seconds=self._longest_stall, **now,
        )  # fmt: skip
        self._seconds = self._stall = self._longest_stall = 0.0
