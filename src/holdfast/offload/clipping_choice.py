"""The choice, before each step, whether updates wait for the gradient norm or are made at once on a guess.

Both ways have the same bits (``Clipping``); which is faster depends on the machine and on how often a guess is wrong.
A run begins by waiting, since early training clips often. Once at least half of the recent steps would have been
guessed right, guessing is tried; from then on the way with the lower expected time is taken. A step after a change is
not measured, because updates of the step before were under way in it. On a run that clips every step nothing is tried.

Called by ``StepMaker``; of several ranks the first one's choice holds for all.
"""

from __future__ import annotations

from ..schedule.work import ClippingMode

DEFER: ClippingMode = "defer"
SPECULATE: ClippingMode = "speculate"
TRIED_BELOW = 0.5
"""The share of wrong guesses below which guessing is tried for the first time."""
MEASURED = 3
"""Measured steps that a decision needs."""
CLEARLY = 0.97
"""The factor by which guessing must be faster than waiting to be begun again."""
WRONG_COST = 2.0
"""The assumed time of a step guessed wrong, in steps guessed right, until one was measured."""
RECENT_SHARE, RECENT_SECONDS = 1 / 8, 1 / 4
"""The weights of the newest step in the running means."""


class ClippingChoice:
    """The choice of one run, by running means of the times that its steps took in both ways."""

    def __init__(self) -> None:
        self.mode = DEFER
        """The way of the next step."""
        self.wrong_share = 1.0
        """The running share of steps whose guess was wrong, or would have been."""
        self._seconds: dict[tuple[ClippingMode, bool], float] = {}
        """The running mean time of a step, by its way and by whether it was guessed wrong (False while waiting)."""
        self._since_change = -1

    def over(self, mode: ClippingMode, clipped: bool, seconds: float) -> None:
        """Note a step, and choose the way of the next one.

        Args:
            mode: The way in which it was done.
            clipped: Whether a guess that nothing is clipped or skipped was wrong, or would have been.
            seconds: Its time.
        """
        self.wrong_share += (clipped - self.wrong_share) * RECENT_SHARE
        self._since_change += 1
        if mode == self.mode and self._since_change > 0:
            key = mode, clipped and mode == SPECULATE
            before = self._seconds.get(key, seconds)
            self._seconds[key] = before + (seconds - before) * RECENT_SECONDS
        chosen = self._chosen()
        if chosen != self.mode:
            self.mode, self._since_change = chosen, -1

    def _chosen(self) -> ClippingMode:
        if self._since_change < MEASURED:
            return self.mode
        waiting, right = self._seconds.get((DEFER, False)), self._seconds.get((SPECULATE, False))
        if right is None or waiting is None:
            return SPECULATE if self.wrong_share < TRIED_BELOW else DEFER
        wrong = self._seconds.get((SPECULATE, True), WRONG_COST * right)
        guessing = right + (wrong - right) * self.wrong_share
        return SPECULATE if guessing < waiting * (1.0 if self.mode == SPECULATE else CLEARLY) else DEFER
