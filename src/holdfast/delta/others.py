"""Others: how long a rank waits for the rest, and whom it names when that was too long.

A rank that has ended, or whose replica hangs, is told of by the first rank or by itself, and within seconds. What is
left is one that is slow, or stopped: as long as it gives signs of life it is waited for. Seconds.
"""

from __future__ import annotations

import warnings

from ..errors import RankFailed
from . import awake
from .agreement import PROBE_SECONDS, Agreement

GRACE_SECONDS = 2 * PROBE_SECONDS
"""How much longer than its own replica others are waited for: who fails knows better why."""


class Others:
    """Of one wait, for all to have ``step`` and for the base ``number`` of ``base_step`` to end."""

    def __init__(
        self, agreement: Agreement, deadline_seconds: float, step: int, number: int, base_step: int
    ) -> None:
        self._agreement, self._deadline = agreement, deadline_seconds
        self._step, self._number, self._base_step = step, number, base_step
        self._sign: object = None
        self._since = self._began = awake.now()
        self._has_warned = False

    def check(self, durable_step: int) -> None:
        """Asked again and again while others are waited for. Warns of one that is slow, once; raises ``RankFailed``
        when nothing was heard of it for too long. ``durable_step`` is what survives whatever it does."""
        now, standing = awake.now(), self._agreement.standing
        sign = (standing.durable_step, standing.base_wanted, standing.missing)
        if sign != self._sign:
            self._sign, self._since = sign, now
        if now > self._since + self._deadline + GRACE_SECONDS:
            raise RankFailed(
                f"{self._who()}, and nothing was heard of it for {now - self._since:.0f} s: it is slow or has been"
                f" stopped, and has not ended. Step {durable_step} is durable on all ranks. See what that rank does,"
                " give a longer deadline_seconds=, and start all ranks again to resume."
            )
        if now > self._began + self._deadline and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._who()} for {now - self._began:.0f} s. It is slow and goes on, so it is waited for.",
                stacklevel=6,
            )

    def _who(self) -> str:
        standing = self._agreement.standing
        if standing.durable_step < self._step:
            return f"rank {standing.behind} has got to step {standing.durable_step} of {self._step}"
        if standing.base_wanted < self._number:
            return f"rank 0 has not begun the base of step {self._base_step}"
        if standing.missing:
            ranks = " and ".join(str(rank) for rank, _ in standing.missing)
            return f"rank {ranks} has not written its share of the base of step {self._base_step}"
        return f"rank 0 has not made a commit of the base of step {self._base_step}"
