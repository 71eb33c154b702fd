"""The seconds that a process has between a SIGTERM and its end, where something kills it after them.

What would take longer than the seconds left, at the rate at which the disk has written until then, is not begun.
Nothing is acknowledged for it: ``durable_step`` stays at what is on the disk, and a resume continues there. Called by
``Checkpointer`` and by the log backend. Times are seconds, of the monotonic clock.
"""

from __future__ import annotations

import time

from ..errors import BadInput
from ..quantities import format_seconds
from .sigterm import SigTerm

RESERVED_SHARE, RESERVED_SECONDS = 0.1, 0.5
"""The part of the seconds, and the most, that is reserved for the end of the process itself."""


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
