"""Stopping in order: the first SIGINT or SIGTERM asks, the second one leaves at once.

A signal may arrive inside any statement, a print included, so the handler itself does nothing that takes a
lock: it sets a flag, which the training loop reads between steps. Leaving at once is safe at any moment,
because what was acknowledged is on the disk.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, whether somebody wants the run to stop; ``said`` is then given the text to show."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self.requested = ""
        """The name of the signal, or nothing."""
        self._said = said
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            leave_at_once(number)
        self.requested = signal.Signals(number).name
        self._said(f"{self.requested}: finishing this step and committing; again to leave at once")


def leave_at_once(number: int) -> None:
    """End the process as the signal would have, but with the terminal's cursor visible."""
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h\n")
    os._exit(128 + number)
