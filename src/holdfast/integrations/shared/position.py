"""The position in a torch ``DataLoader``, which has none of its own: a number of batches of an epoch.

Batches that were trained on are skipped by their indices alone. The generators are stored as they were when the epoch
began, so that its order is drawn again, and are set to where the run had them when the first new batch is made. Loaders
are one batch ahead of training, so a batch that is made but not handed out is made again with its own draws (masks,
augmentation). Another number of ranks continues after the same samples, as far as ``epoch_batches`` allows that; other
batch sizes are refused. Called by the integrations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...errors import BadInput, RunMismatch
from ...state.progress import random_state, restore_random_state
from .epoch_batches import EpochBatches


class LoaderPlace:
    """The place of one of ``num_ranks`` in ``loader``, torch's own or a wrapper. The caller counts the batches."""

    def __init__(self, loader: Any, num_ranks: int, accumulation: int = 1, moves: int = 1) -> None:
        """Wrap the loader's batch sampler.

        Args:
            loader: The loader.
            num_ranks: The number of ranks that train.
            accumulation: The batches of one optimizer step.
            moves: The moves of the learning-rate schedule in an optimizer step.

        Raises ``BadInput`` for a loader whose batches cannot be skipped.
        """
        self._inside = getattr(loader, "base_dataloader", loader)
        _refuse(self._inside)
        self._num_ranks, self.accumulation, self.moves = num_ranks, accumulation, moves
        self._watched = _watched(self._inside)
        self._watched.begins = self._begin
        self._order = Order(self._inside, self._watched.inner)
        self.is_read = False
        """True once batches were requested."""
        self._begun: dict[str, Any] | None = None
        """The generators that the order of the epoch was drawn from."""
        self._restored: dict[str, Any] | None = None
        """The place of the run, until its epoch continues."""
        self._random: dict[str, Any] = {}
        self._is_over = False
        """True if the epoch that continues has no further batch."""

    def state(self, count: int) -> dict[str, Any]:
        """Return the place after ``count`` batches of the current epoch; 0 also if no epoch has begun."""
        return {
            "same": self.same(),
            "epoch_batches": self._epoch_batches().as_dict(),
            "count": count,
            "begun": self._begun if count else None,
            "pending": self._pending(count),
            "seed": self._order.seed,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise ``RunMismatch`` if the place of ``state`` refers to other batches."""
        if (there := self._of_other_ranks(state)) is None:
            refuse_other_batches(state["same"], self.same(), "the run")
        else:
            here = self._epoch_batches()
            here.refuse_unlike(there, "the run")
            here.count_of(there, state["count"])

    def count_of(self, state: dict[str, Any]) -> int:
        """Return the number of batches, of this number of ranks, that the run had done of the epoch at ``state``."""
        there = self._of_other_ranks(state)
        return state["count"] if there is None else self._epoch_batches().count_of(there, state["count"])

    def load(self, state: dict[str, Any], random: dict[str, Any], most: float = math.inf) -> None:
        """Continue from ``state`` in the next epoch that begins; ``random`` is the state of the generators there.

        An epoch has ``most`` batches: once these are done there is no further one, also where the loader has more.
        """
        self._order.seed = state["seed"]
        self._begun, self._random = state["begun"], random
        if self._of_other_ranks(state) is not None:  # whose next batch was another
            state = {**state, "count": self.count_of(state), "pending": None}
        self._is_over = state["count"] == most
        self._restored = state if self._begun is not None else None

    def leave(self) -> None:
        """Skip an epoch that the run had completed. Its order is drawn, because drawing advances the generators."""
        if self._restored is not None:
            now = random_state()
            next(iter(self._watched), None)
            restore_random_state(now)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a sampler that shuffles by it."""
        if hasattr(self._order.sampler, "set_epoch"):
            self._order.sampler.set_epoch(epoch)

    def close(self) -> None:
        """Restore the loader."""
        _set_indices(self._inside, self._watched.inner)

    def _begin(self) -> None:
        self.is_read = True
        found, self._restored = self._restored, None
        if found is None:
            self._begun = self._order.now()
            return
        pending = [found["pending"]] if found["pending"] is not None else []
        states, ahead = [*pending, self._random], None
        if self._is_over:
            states, ahead = [self._random], self._inside.num_workers * (self._inside.prefetch_factor or 0)
        self._watched.replay_generators(found["count"], states, pass_over=True, drawn_ahead=ahead)
        self._order.put_back(found["begun"])

    def _pending(self, count: int) -> dict[str, Any] | None:
        """Return the generators before the batch that is already made but not handed out; None if there is none."""
        number, state = self._watched.newest
        return state if count and number == count and not self._inside.num_workers else None

    def _of_other_ranks(self, state: dict[str, Any]) -> EpochBatches | None:
        """Return the batches of the run at ``state`` if it had another number of ranks; None if it had this one.

        None as well for a run of a version that did not store them.
        """
        found = state.get("epoch_batches")
        return None if found is None or found["ranks"] == self._num_ranks else EpochBatches(**found)

    def _epoch_batches(self) -> EpochBatches:
        return EpochBatches.of(
            self._watched.inner,
            self._inside.dataset,
            ranks=self._num_ranks,
            accumulation=self.accumulation,
            moves=self.moves,
        )

    def same(self) -> dict[str, Any]:
        """Return the values that a place depends on, by name."""
        return {
            "a number of ranks of": self._num_ranks,
            "a batch size of": getattr(self._watched.inner, "batch_size", None),
            "a dataset of length": len(self._inside.dataset),
        }


class Batches:
    """The batches of ``loader``, to be iterated over in its place. A pass is an epoch, also if it was left early.

    One that was left (by an error, by a ``break``) has ended for who asks for ``epoch``. A saved position lies within
    it until ``end_left_pass`` or the next pass, so that a resume trains the batches that an error left.

    ``elastic`` is true because this class itself refuses another number of ranks where a place would mean another one.
    """

    elastic = True
    schedule_advice = "Give it to accelerator.prepare, before training."

    def __init__(self, loader: Any, num_ranks: int, accumulation: int = 1, moves: int = 1) -> None:
        """Wrap the loader, as ``LoaderPlace`` does. Raises ``BadInput`` for one whose batches cannot be skipped."""
        self.loader = loader
        self.place = LoaderPlace(loader, num_ranks, accumulation, moves)
        self._epoch = 0
        self._count = 0
        """The number of batches of the newest pass that were handed out."""
        self._restored: dict[str, Any] | None = None
        """The place of the run, from ``load_state_dict`` to ``resumed``."""
        self._is_left, self._newest = False, object()
        self._has_begun = False
        """True once a pass has begun."""

    @property
    def epoch(self) -> int:
        """The number of passes that have ended."""
        return self._epoch + self._is_left

    @property
    def count(self) -> int:
        """The number of batches of the pass ``epoch`` that were handed out."""
        return 0 if self._is_left else self._count

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.end_left_pass()
        self._has_begun = True
        number, newest = getattr(self.loader, "iteration", None), object()
        self._newest = newest
        try:
            for batch in self.loader:
                self._count += 1
                yield batch
        finally:
            self._is_left |= self._newest is newest  # an older one may be let go of late
        if number is not None:  # accelerate does not count a pass without remaining batches
            self.loader.iteration = number + 1
        self.end_left_pass()

    def refuse_other_loop(self) -> None:
        """Raise ``BadInput`` if the loader was read, and never by iterating over this object."""
        if self.place.is_read and not self._has_begun:
            raise BadInput(
                "the loop iterates over the loader itself, and its place there is not known: write"
                " `for batch in ckpt.batches`"
            )

    def end_left_pass(self) -> None:
        """Let saved positions lie after the pass that was left, if one was."""
        if self._is_left:
            self._epoch, self._count, self._is_left = self._epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored
        iteration = getattr(self.loader, "iteration", None)
        return {"epoch": self._epoch, "iteration": iteration, **self.place.state(self._count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place.check(state)
        self._restored = state

    def resumed(self) -> None:
        """Continue from the restored state. Called when the generators are where the run had them."""
        found, self._restored = self._restored, None
        if found is not None:
            self.place.load(found, random_state())
            self._epoch, self._count = found["epoch"], self.place.count_of(found)
            self._is_left, self._newest = False, object()
            if found["iteration"] is not None:
                self.loader.iteration = found["iteration"]


def _watched(loader: DataLoader) -> WatchedBatches:
    """Wrap the indices of ``loader`` in ``WatchedBatches``."""
    indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    watched = WatchedBatches(indices.inner if isinstance(indices, WatchedBatches) else indices)
    _set_indices(loader, watched)
    return watched


def _set_indices(loader: DataLoader, indices: Any) -> None:
    """Replace the indices in the loader's ``__dict__``; ``setattr`` is refused, since lengths might differ."""
    vars(loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = indices


def _refuse(loader: Any) -> None:
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        raise BadInput(
            f"{type(loader).__name__} is not a plain DataLoader of torch, in which a place can be found again. Give one"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise BadInput(
            "an IterableDataset is read one sample after the other, so that its batches cannot be passed over."
            " Give a dataset with a length and items by index."
        )
    if loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler):
        raise BadInput("a DataLoader with batch_size=None has no batches to count: give it a batch size")


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
        self._drawn_ahead: int | None = None

    def replay_generators(
        self,
        first: int,
        states: list[dict[str, Any]],
        pass_over: bool = False,
        drawn_ahead: int | None = None,
    ) -> None:
        """Set the generators in the next epoch to one of ``states`` at each request, from batch ``first`` on.

        With ``pass_over`` earlier batches are skipped. With ``drawn_ahead`` the epoch ends before batch ``first``. The
        indices of so many further batches are drawn, because workers had asked for them, and a sampler may draw random
        numbers at its end, too.
        """
        self._first, self._states, self._pass_over, self._drawn_ahead = first, states, pass_over, drawn_ahead

    def __iter__(self) -> Iterator[Any]:
        self.begins()
        first, states, self._first, self._states = self._first, self._states, 0, []
        pass_over, self._pass_over = self._pass_over, False
        drawn_ahead, self._drawn_ahead = self._drawn_ahead, None
        batches = iter(self.inner)
        for number in count():
            if number >= first and drawn_ahead is not None:
                for _ in range(drawn_ahead):
                    next(batches, None)
                restore_random_state(states.pop(0))
                return
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
        """Restore what ``now`` returned. A run of several ranks may have given the sampler a generator."""
        restore_random_state(state["random"])
        if "sampler" in state["own"] and getattr(self.sampler, "generator", self) is None:
            self.sampler.generator = torch.Generator()
        for place, generator in self._own().items():
            if place in state["own"]:
                generator.set_state(state["own"][place])

    def _own(self) -> dict[str, torch.Generator]:
        at = {"loader": self._loader, "sampler": self.sampler}
        found = {place: getattr(each, "generator", None) for place, each in at.items()}
        return {place: each for place, each in found.items() if isinstance(each, torch.Generator)}
