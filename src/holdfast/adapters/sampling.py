"""Sampling: a sampler that knows which random numbers a batch was made with.

Loaders are one batch ahead of training, so a batch that is made in this process draws its random numbers (masking,
augmentation) before the step that precedes it. To make the same batch again, the generators must be as they were then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..state.progress import random_state, restore_random_state


class WatchedSampler:
    """``sampler``, of which ``batch_size`` samples at a time are taken; in all else as it is."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        self.inner, self._batch_size = sampler, batch_size
        self._first = 0
        self._states: list[dict[str, Any]] = []
        self.newest: tuple[int, dict[str, Any]] = (-1, {})
        """The batch that was made last in this epoch, and the generators before."""

    def go_on(self, first: int, states: list[dict[str, Any]]) -> None:
        """When batch ``first`` of the next epoch is made, and those behind it, set the generators to ``states``."""
        self._first, self._states = first, states

    def __iter__(self) -> Iterator[int]:
        first, states, self._first, self._states = self._first, self._states, 0, []
        samples = iter(self.inner)
        number = 0
        while True:
            batch, rest = divmod(number, self._batch_size)
            if rest == 0 and batch >= first:
                if states:
                    restore_random_state(states.pop(0))
                self.newest = (batch, random_state())
            try:
                sample = next(samples)
            except StopIteration:
                break
            yield sample
            number += 1
        if states:
            restore_random_state(states[-1])

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
