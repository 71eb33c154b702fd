"""Stopping in order: the first SIGINT or SIGTERM asks, the second one leaves at once.

A signal may arrive inside any statement, a print included, so the handler itself does nothing that takes a
lock: it sets a flag, which the training loop reads between steps. Leaving at once is safe at any moment,
because what was acknowledged is on the disk.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINAL = 0
"""Standard input, where the control keys come from."""


class StopRequest:
    """While entered, whether somebody wants the run to stop; ``said`` is then given the text to show."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self.requested = ""
        """The name of the signal, or nothing."""
        self._said = said
        self._previous: dict[int, Any] = {}
        self._echo: list[Any] | None = None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._echo = hide_control_keys()
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        show_control_keys(self._echo)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            show_control_keys(self._echo)
            leave_at_once(number)
        self.requested = signal.Signals(number).name
        self._said(f"{self.requested}: finishing this step and committing; again to leave at once")


def leave_at_once(number: int) -> None:
    """End the process as the signal would have, but with the terminal's cursor visible."""
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h\n")
    os._exit(128 + number)


def hide_control_keys() -> list[Any] | None:
    """Keep the terminal from writing ``^C`` into the picture; its settings, None without one."""
    try:
        settings = termios.tcgetattr(TERMINAL)
        quiet = [*settings[:3], settings[3] & ~termios.ECHOCTL, *settings[4:]]
        termios.tcsetattr(TERMINAL, termios.TCSANOW, quiet)
        return settings
    except (termios.error, OSError):
        return None


def show_control_keys(settings: list[Any] | None) -> None:
    if settings is not None:
        termios.tcsetattr(TERMINAL, termios.TCSANOW, settings)
