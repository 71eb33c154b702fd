"""Monitor of the ranks that this rank waits for: it reports slow and stopped ranks by name.

A rank that has ended, or whose replica hangs, is reported within seconds by itself or the first rank. What remains is a
rank that is slow or stopped; it is waited for as long as it sends heartbeats. Seconds.
"""

from __future__ import annotations

import warnings

from ...errors import RankFailed
from .. import running_clock
from ..coordinator import PROBE_SECONDS, RankCoordinator

GRACE_SECONDS = 2 * PROBE_SECONDS
"""The extra time that other ranks get beyond this rank's replica: the failing one knows the cause better."""


class StragglerMonitor:
    """Detects ranks that stopped making progress while this rank waits for them.

    The wait is for all ranks to have ``step``, and for snapshot ``number``, of ``base_step``, to end. Warns once about
    a slow rank.
    """

    def __init__(
        self, agreement: RankCoordinator, deadline_seconds: float, step: int, number: int, base_step: int
    ) -> None:
        self._agreement, self._deadline = agreement, deadline_seconds
        self._step, self._number, self._base_step = step, number, base_step
        self._sign: object = None
        self._since = self._began = running_clock.now()
        self._has_warned = False

    def check(self, durable_step: int) -> None:
        """Check the progress of the other ranks. Called repeatedly during the wait.

        Warns once of a slow rank. Raises ``RankFailed`` when a rank has sent no heartbeat for too long.
        ``durable_step`` is the step that survives in any case, for the message.
        """
        now, standing = running_clock.now(), self._agreement.standing
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
