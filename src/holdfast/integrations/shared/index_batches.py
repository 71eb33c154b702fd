"""Sampling: batches of indices, and the random numbers with which batches were made.

Loaders are one batch ahead of training. A batch that is made in the training process draws its random numbers (masks,
augmentation) before the previous step. Making the same batch again requires the generators as they were then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from ...errors import RunMismatch
from ...state.progress import random_state, restore_random_state


def refuse_other_batches(there: dict[str, Any], here: dict[str, Any], run: object) -> None:
    """Raise ``RunMismatch`` unless batches are made as the run's were: ``there`` and ``here`` hold values by name."""
    for key, was in there.items():
        if here[key] != was:
            raise RunMismatch(
                f"{run} was trained with {key} {was}, now it is {here[key]}, and its place in the data means nothing"
                f" there. Set it to {was}, or begin another run."
            )


class WatchedBatches:
    """A batch sampler that wraps ``inner`` and records the generators each time that a batch is requested."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.begins: Callable[[], None] = lambda: None
        """A function that is called at the first request of an epoch, before its order is drawn."""
        self.newest: tuple[int, dict[str, Any]] = (-1, {})
        """The number, in its epoch, of the last requested batch, and the generators before it."""
        self._first = 0
        self._states: list[dict[str, Any]] = []
        self._pass_over = False

    def replay_generators(self, first: int, states: list[dict[str, Any]], pass_over: bool = False) -> None:
        """Set the generators in the next epoch to one of ``states`` at each request, from batch ``first`` on.

        With ``pass_over`` earlier batches are skipped.
        """
        self._first, self._states, self._pass_over = first, states, pass_over

    def __iter__(self) -> Iterator[Any]:
        self.begins()
        first, states, self._first, self._states = self._first, self._states, 0, []
        pass_over, self._pass_over = self._pass_over, False
        batches = iter(self.inner)
        for number in count():
            if number >= first and states:
                restore_random_state(states.pop(0))
            before = random_state() if number >= first else {}
            try:
                batch = next(batches)
            except StopIteration:
                return
            if pass_over and number < first:
                continue
            self.newest = (number, before)
            yield batch

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Order:
    """The generators that ``loader`` draws the order of an epoch from: the global ones and its own."""

    def __init__(self, loader: Any, batches: Any) -> None:
        self._loader, self._batches = loader, batches

    @property
    def sampler(self) -> Any:
        """The sampler of single samples."""
        sampler = self._batches
        for name in ("batch_sampler", "sampler"):  # inside the samplers of a rank's share and of batches
            sampler = getattr(sampler, name, sampler)
        return sampler

    @property
    def seed(self) -> int | None:
        """The seed of a sampler that shuffles by seed and epoch; None for others."""
        return getattr(self.sampler, "initial_seed", None)

    @seed.setter
    def seed(self, seed: int | None) -> None:
        if seed is not None:
            self.sampler.initial_seed = seed

    def now(self) -> dict[str, Any]:
        """Return the state from which the order of an epoch follows. Called at its beginning."""
        own = {place: generator.get_state() for place, generator in self._own().items()}
        return {"random": random_state(), "own": own}

    def put_back(self, state: dict[str, Any]) -> None:
        restore_random_state(state["random"])
        for place, generator in self._own().items():
            if place in state["own"]:
                generator.set_state(state["own"][place])

    def _own(self) -> dict[str, torch.Generator]:
        at = {"loader": self._loader, "sampler": self.sampler}
        found = {place: getattr(each, "generator", None) for place, each in at.items()}
        return {place: each for place, each in found.items() if isinstance(each, torch.Generator)}
