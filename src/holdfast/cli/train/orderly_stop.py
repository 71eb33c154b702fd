"""The orderly stop of a training: the first SIGINT or SIGTERM requests it, the second one leaves at once.

A signal may arrive inside any statement, a print included, so the handler does nothing that takes a lock. It sets a
flag, which the training loop reads between steps. Leaving at once is always safe, because every durable step is on the
disk. Called by ``train_job``.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINAL = 0
"""Standard input, which the control keys come from."""


class StopRequest:
    """A request to stop the run by a signal, which is handled while this context is entered.

    ``show`` gets the text that announces the stop. ``last_words`` returns the text for leaving at once. Of several
    processes only the one that ``speaks`` uses the terminal.
    """

    def __init__(
        self, show: Callable[[str], None], last_words: Callable[[], str], speaks: bool = True
    ) -> None:
        self.requested = ""
        """The name of the signal; empty without one."""
        self._show, self._last_words, self._speaks = show, last_words, speaks
        self._previous: dict[int, Any] = {}
        self._terminal: list[Any] | None = None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._terminal = quiet_keys() if self._speaks else None
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        restore(self._terminal)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            restore(self._terminal)
            leave_at_once(number, self._last_words() if self._speaks else None)
        self.requested = signal.Signals(number).name
        if self._speaks:
            self._show(f"{self.requested}: committing this step; again to leave at once")


def leave_at_once(number: int, last_words: str | None) -> None:
    """End the process as the signal would have, but with the terminal's cursor visible."""
    with suppress(OSError):  # the reader may have left
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h\n")
        if last_words is not None:
            os.write(2, last_words.encode(errors="replace") + b"\n")
    os._exit(128 + number)


def quiet_keys() -> list[Any] | None:
    """Keep key presses out of the picture, and return the terminal's previous settings.

    The terminal echoes no keys, and Ctrl-C does not discard output that was not yet shown. None if this process has no
    terminal.
    """
    try:
        settings = termios.tcgetattr(TERMINAL)
    except termios.error:
        return None
    local = settings[3] & ~termios.ECHO | termios.NOFLSH
    return settings if set_terminal([*settings[:3], local, *settings[4:]]) else None


def restore(settings: list[Any] | None) -> None:
    if settings is not None:
        set_terminal(settings)


def set_terminal(settings: list[Any]) -> bool:
    """Change the terminal, unless this process is in the background, where the attempt would stop it."""
    try:
        if os.tcgetpgrp(TERMINAL) != os.getpgrp():
            return False
    except OSError:
        pass  # the terminal controls no process
    termios.tcsetattr(TERMINAL, termios.TCSANOW, settings)
    return True
