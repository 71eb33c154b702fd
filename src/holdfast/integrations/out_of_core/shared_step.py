"""A step of the engine that stops at each micro-batch, so that another library's loop can take part in it.

The step runs on a thread of its own, and one of the two threads runs at a time. Called by the thread of the loop,
except for ``hand_over``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...offload.engine import Engine
from ...offload.model.microbatches import Coroutine, OwnCall, without_autocast


class SharedStep:
    """A step of ``engine`` over the micro-batches of ``calls``, each of which calls ``hand_over`` once.

    Call order: ``begin``, then ``go_on`` for each micro-batch; or ``abandon`` at any time.
    """

    def __init__(self, engine: Engine, calls: Sequence[OwnCall]) -> None:
        self._engine = engine
        self._coroutine = Coroutine(partial(engine.step, calls), is_micro_batch=False)
        self._has_begun = False

    def begin(self) -> Any:
        """Run the step up to where the first micro-batch hands over, and return what it hands over."""
        self._has_begun = True
        with without_autocast():  # the engine's dtype is in the place of autocast
            return self._take(self._coroutine.start)

    def go_on(self, reply: Any) -> Any:
        """Give the waiting micro-batch its ``reply``, and return what the next hands over, or how the step ended."""
        return self._take(partial(self._coroutine.resume, reply))

    def hand_over(self, value: Any) -> Any:
        """Hand ``value`` over to the loop, and return its reply. Called by a micro-batch's thread."""
        return self._coroutine.hand_over(value)

    def abandon(self) -> None:
        """Give the step up, with the engine. The run is whole up to the step before.

        A step that has just ended is given up as well: the loop does not know of it, and would not end its own part.
        """
        if self._has_begun:
            if not self._coroutine.finished:
                self._engine.interrupt()
            self._coroutine.cancel()
            if not self._engine.is_closed:
                self._engine.give_up()

    def _take(self, switch: Any) -> Any:
        try:
            return switch()
        except BaseException:
            self.abandon()
            raise
