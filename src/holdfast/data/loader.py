"""Loaders that know where they are: a position is the number of samples consumed by all ranks together.

Sample ``n`` of a run is a pure function of (seed, n), so a position means the same under any batch size,
number of micro-batches or world size, and a run resumes in mid-epoch after all of them have changed. The
stream has no end unless told otherwise, and a batch may straddle two epochs: no sample is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import default_collate

from ..errors import BadInput, RunMismatch
from .corpus import Corpus
from .order import sample_index


class MapDataset(Protocol):
    """Anything with a length and items by index, as ``torch.utils.data.Dataset``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class SampleLoader:
    """Batches of ``dataset`` in a seeded order; on each rank, its share of every global batch.

    Iterating continues at the position. Of each ``batch_size * world_size`` consecutive samples rank r
    takes the r-th part. ``epochs`` ends the stream: the last batch may then be short, by the same number
    on every rank, and up to ``world_size - 1`` samples that cannot be shared out are left.

    >>> loader = SampleLoader(range(5), batch_size=2, epochs=1)
    >>> sorted(value.item() for batch in loader for value in batch)
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise BadInput(f"batch_size {batch_size}, rank {rank} of {world_size}: not a share of a batch")
        if len(dataset) == 0:
            raise BadInput("the dataset has no samples")
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.world_size, self.epochs = rank, world_size, epochs
        self.collate = collate
        self.consumed = 0

    def __iter__(self) -> SampleLoader:
        return self

    def __next__(self) -> Any:
        share = self._share()
        if share == 0:
            raise StopIteration
        first = self.consumed + self.rank * share
        size = len(self.dataset)
        chosen = [sample_index(number, size=size, seed=self.seed) for number in range(first, first + share)]
        batch = self.collate([self.dataset[index] for index in chosen])
        self.consumed += share * self.world_size
        return batch

    def _share(self) -> int:
        """Samples for each rank in the next batch."""
        if self.epochs is None:
            return self.batch_size
        left = self.epochs * len(self.dataset) - self.consumed
        return max(0, min(self.batch_size, left // self.world_size))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What tells this data from other data: the dataset's own ``fingerprint``, or its length."""
        return getattr(self.dataset, "fingerprint", {"samples": len(self.dataset)})

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out; the same on every rank."""
        return {"seed": self.seed, "consumed": self.consumed, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, with its seed. Raises ``RunMismatch`` on other data."""
        for key, stored in state["fingerprint"].items():
            if self.fingerprint.get(key) != stored:
                raise RunMismatch(
                    f"the data is not what the run was trained on: {key} was {stored}, now it is "
                    f"{self.fingerprint.get(key)}. Give the same data, or start a run in another directory."
                )
        self.seed, self.consumed = state["seed"], state["consumed"]


loader = SampleLoader
"""``holdfast.loader``: over any map-style dataset, as one would write ``DataLoader``."""


def step_loader(
    corpus: Corpus,
    micro_batch_size: int,
    micro_batches: int,
    *,
    seed: int = 0,
) -> SampleLoader:
    """Optimizer steps over a corpus: each item is a list of ``micro_batches`` dicts for the model.

    In each, ``tokens`` and ``targets`` are int64[micro_batch_size, context].
    """
    return SampleLoader(
        corpus.training,
        micro_batch_size * micro_batches,
        seed=seed,
        collate=lambda samples: micro_batches_of(samples, micro_batch_size),
    )


def micro_batches_of(samples: Sequence[dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """``samples`` stacked ``size`` at a time."""
    return [default_collate(list(samples[start : start + size])) for start in range(0, len(samples), size)]
