"""Sampling: batches of indices, and the random numbers that the batches were made with.

Loaders are one batch ahead of training. A batch that is made in the training process draws its random numbers (masks,
augmentation) before the step in front of it, so to make the same one again the generators must be as they were then.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from ..state.progress import random_state, restore_random_state


class WatchedBatches:
    """A batch sampler: ``inner``, with an eye on the generators each time that a batch is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.newest: tuple[int, dict[str, Any]] = (-1, {})
        """The number in its epoch of the batch asked for last, and the generators before."""
        self._first = 0
        self._states: list[dict[str, Any]] = []

    def go_on(self, first: int, states: list[dict[str, Any]]) -> None:
        """In the next epoch, set the generators to one of ``states`` when batch ``first`` is asked for, and to the next
        one with the next."""
        self._first, self._states = first, states

    def __iter__(self) -> Iterator[Any]:
        first, states, self._first, self._states = self._first, self._states, 0, []
        batches = iter(self.inner)
        for number in count():
            if number >= first and states:
                restore_random_state(states.pop(0))
            before = random_state() if number >= first else {}
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.newest = (number, before)
            yield batch

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
