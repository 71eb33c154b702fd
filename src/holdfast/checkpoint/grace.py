"""The end of a process after a SIGTERM: a limit of time, and a training that has lost a rank.

1. Where something kills the process some seconds after the signal, no write begins that would take longer than the
   seconds left, at the rate of the disk until then. ``durable_step`` stays at what is on the disk, and a resume
   continues there.
2. A rank that waits in a collective for a dead rank runs no handler. A thread ends the process instead.

Called by ``Checkpointer`` and by the log backend. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import ClassVar, Self

from ..errors import BadInput
from ..quantities import format_seconds

RESERVED_SHARE, RESERVED_SECONDS = 0.1, 0.5
"""The part of the seconds, and the most, that is reserved for the end of the process itself."""

POLL_SECONDS = 0.02
LAST_SECONDS = 10.0
"""The longest time that a rank whose training is broken writes after a SIGTERM."""


def check_grace(seconds: float | None, has_replica: bool) -> None:
    """Raise ``BadInput`` for seconds that are none, or where a replica makes the snapshots."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise BadInput(
            f"grace_seconds = {seconds!r} must be more than 0; leave it out to have everything written"
        )
    if has_replica:
        raise BadInput(
            "grace_seconds= is for records, and with replica= the last steps are in the replica's memory, which"
            " outlives the process: leave out one of them"
        )


class Grace:
    """The seconds after the SIGTERM that ``sigterm`` notes; None where the script handles it itself."""

    def __init__(self, seconds: float, sigterm: SigTerm | None) -> None:
        self.seconds, self._sigterm = seconds, sigterm
        self._began: float | None = None
        self.hurries = False
        """True once the process is about to end, within the seconds."""

    def begin(self) -> None:
        """Begin to hurry. On a rank that no SIGTERM has reached, the seconds begin now."""
        self.hurries = True
        if self.ends_at is None:
            self._began = time.monotonic()

    @property
    def ends_at(self) -> float | None:
        """The time at which the last write has to end; None before the signal."""
        arrived = None if self._sigterm is None else self._sigterm.arrived_at
        began = self._began if arrived is None else arrived
        reserved = min(RESERVED_SECONDS, RESERVED_SHARE * self.seconds)
        return None if began is None else began + self.seconds - reserved

    def allows(self, seconds: float) -> bool:
        """Return whether work of so many ``seconds`` would end in time. Always true before the signal."""
        ends_at = self.ends_at
        return ends_at is None or time.monotonic() + seconds <= ends_at

    def describe(self, durable_step: int, steps_done: int) -> str:
        """Return a sentence about the steps that were left out; empty if there are none."""
        if durable_step >= steps_done:
            return ""
        first = durable_step + 1
        left = f"Steps {first:,} to {steps_done:,} are" if steps_done > first else f"Step {first:,} is"
        return (
            f"SIGTERM: step {durable_step:,} is durable. {left} not known to be: writing more would have taken longer"
            f" than grace_seconds ({format_seconds(self.seconds)}). A resume does again what is lost."
        )


class SigTerm:
    """A watcher that notes the first SIGTERM. A second one ends the process at once.

    The handler only notes the signal, because it may arrive inside any statement. ``Checkpointer`` asks at the end of
    each step and then makes the step durable.
    """

    _waking: ClassVar[SigTerm | None] = None
    """The watcher whose thread learns of signals by a file descriptor."""

    def __init__(self) -> None:
        self.arrived = False
        self.arrived_at: float | None = None
        """The time of the signal, in seconds of the monotonic clock."""
        self._over = False
        self._process = os.getpid()
        self._wakeups: int | None = None

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

    def end_if(self, is_broken: Callable[[], bool], finish: Callable[[], None]) -> None:
        """End the process with exit code 143 once the signal has arrived and ``is_broken()`` is true.

        Launchers send SIGTERM to all ranks when one has died, and wait for all to end before they start them again. A
        handler in Python waits for the main thread, which may be in a collective that the dead rank keeps from
        returning. So a thread reads the signal from a file descriptor. It calls ``finish`` before the end, for
        ``LAST_SECONDS`` at most. Does nothing where something else, such as asyncio, already has such a descriptor.
        """
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._wakeups, SigTerm._waking = writing, self
        threading.Thread(
            target=self._await_end, args=(reading, is_broken, finish), name="holdfast-sigterm", daemon=True
        ).start()

    def _await_end(self, reading: int, is_broken: Callable[[], bool], finish: Callable[[], None]) -> None:
        with os.fdopen(reading, "rb", buffering=0) as file:  # open to the end: other signals are written, too
            while (number := file.read(1)) and number[0] != signal.SIGTERM:
                pass
            while number and not self._over:
                if signal.getsignal(signal.SIGTERM) not in (self._note, signal.SIG_DFL):
                    return  # the script has set a handler of its own meanwhile
                if is_broken():
                    _attempt(finish)
                    if self._over:  # meanwhile the main thread has raised the error, which the script handles
                        return
                    _attempt(_flush)
                    os._exit(128 + signal.SIGTERM)
                time.sleep(POLL_SECONDS)

    def _stop_waking(self) -> None:
        """Close the file descriptor by which the thread learns of signals. Called by the main thread."""
        if self._wakeups is None:
            return
        current = signal.set_wakeup_fd(-1)
        if current != self._wakeups:
            signal.set_wakeup_fd(current)  # the script's
        os.close(self._wakeups)
        self._wakeups = SigTerm._waking = None

    def restore(self) -> None:
        """Stop watching, unless the script has set another handler meanwhile.

        Where the handler stays (on another thread, or set again later by a library that had saved it), a SIGTERM ends
        the process as it would without it.
        """
        self._over = True
        if threading.current_thread() is not threading.main_thread():  # only that thread may set handlers
            return
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._stop_waking()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.arrived, self.arrived_at = True, time.monotonic()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._over or os.getpid() != self._process:  # or a forked child, which nothing else would end
            signal.raise_signal(signal.SIGTERM)


def _stop_waking_in_fork() -> None:
    if SigTerm._waking is not None:
        SigTerm._waking._stop_waking()


os.register_at_fork(after_in_child=_stop_waking_in_fork)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _attempt(work: Callable[[], None]) -> None:
    """Do ``work`` in a thread, for ``LAST_SECONDS`` at most. Errors do not matter."""

    def do() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(LAST_SECONDS)
