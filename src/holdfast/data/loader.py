"""Loaders whose position is the number of samples that all ranks together have consumed.

Sample ``n`` of a run is a pure function of (seed, n), random augmentation included. So a position means the same under
any batch size, number of workers, number of micro-batches or world size, and a run resumes in mid-epoch after all of
these have changed. The order of samples is a small block cipher on the index: nothing is stored, and sample 10**12
costs what sample 0 costs. While samples are read, the generators of the process are seeded for each, and restored
afterwards, so workers give the same samples as the trainer and leave its streams alone. By default the stream has no
end, and a batch may straddle two epochs: no sample is dropped. Used by scripts as ``holdfast.loader``, and by
``holdfast train``.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..errors import BadInput, RunMismatch
from .corpus import Windowed

OWN = ("batch_sampler", "collate_fn", "drop_last", "generator", "sampler", "shuffle")
"""The options of torch's ``DataLoader`` that the loader must set itself."""


class SampleLoader:
    """Batches of ``dataset`` in a seeded order; on each rank, its part of every global batch.

    Iterating continues at the position. Of each ``batch_size * world_size`` consecutive samples rank r takes the r-th
    part. ``epochs`` ends the stream: the last batch may then be short, by the same number on every rank, and up to
    ``world_size - 1`` samples that cannot be divided evenly are left. Rank and world size are those of
    ``torch.distributed`` if it is initialised, else 0 of 1.

    ``num_workers`` processes of torch's ``DataLoader`` read ahead; ``options`` are more of its options
    (``pin_memory``, ``prefetch_factor``, ``multiprocessing_context``). A batch counts when it is handed out, not when
    it is read. ``close`` ends the workers, and so do the stream's end and an error; the next batch starts them again.

    Random augmentation belongs to the sample: while the dataset reads sample ``index``, the generators of ``random``,
    NumPy and torch's CPU are seeded with (``seed``, epoch, ``index``). So a sample is the same whatever the batch
    size and the number of workers, and differs in the next epoch. ``collate`` draws from (``seed``, number of the
    batch's first sample). Neither moves the generators of the training script. A generator that the dataset keeps for
    itself is not seeded, nor is that of a device.

    >>> loader = SampleLoader(range(5), batch_size=2, epochs=1)
    >>> sorted(value.item() for batch in loader for value in batch)
    [0, 1, 2, 3, 4]
    """

    elastic = True
    """Always true: a position means the same to any number of ranks."""

    endless = True
    """Always true: a resumed stream does not end with the epoch. Read by ``Checkpointer``."""

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        num_workers: int = 0,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        epochs: int | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        """Prepare the loader. Raises ``BadInput`` with nothing started."""
        rank, world_size = _place(rank, world_size)
        if batch_size < 1 or not 0 <= rank < world_size:
            raise BadInput(f"batch_size {batch_size}, rank {rank} of {world_size}: not a share of a batch")
        if not 0 <= seed < 1 << 64:
            raise BadInput(f"seed = {seed} must be from 0 to 2**64 - 1")
        _check_dataset(dataset)
        _check_options(num_workers, options)
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.world_size, self.epochs = rank, world_size, epochs
        self.num_workers, self.collate = num_workers, collate
        self.consumed = 0
        self._options = options
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> SampleLoader:
        return self

    def __next__(self) -> Any:
        share = self._share(self.consumed)
        if share == 0:
            raise StopIteration
        try:
            if self._batches is None:
                self._batches = iter(self._reader())
            batch = next(self._batches)
        except BaseException:  # the batches that were read ahead are no longer the next ones
            self.close()
            raise
        self.consumed += share * self.world_size
        if not self._share(self.consumed):
            self.close()
        return batch

    def close(self) -> None:
        """End the workers and discard the batches that they read ahead. The position stays."""
        batches, self._batches = self._batches, None
        if hasattr(
            batches, "_shutdown_workers"
        ):  # otherwise they live as long as a traceback names the iterator
            batches._shutdown_workers()

    def _reader(self) -> DataLoader:
        """Return torch's loader from the position on.

        It has a generator of its own, because making an iterator draws a number.
        """
        options: dict[str, Any] = dict(self._options)
        if self.num_workers:
            options["worker_init_fn"] = partial(_begun, options.get("worker_init_fn"))
        return DataLoader(
            _Samples(self.dataset, self.seed, self.collate),
            batch_sampler=self._numbers(self.consumed),  # type: ignore[arg-type]
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **options,
        )

    def _numbers(self, position: int) -> Iterator[list[int]]:
        """Yield the numbers of this rank's samples from ``position`` on, batch by batch."""
        while share := self._share(position):
            first = position + self.rank * share
            yield list(range(first, first + share))
            position += share * self.world_size

    def _share(self, position: int) -> int:
        """Return the number of samples for each rank in the batch at ``position``."""
        if self.epochs is None:
            return self.batch_size
        left = self.epochs * len(self.dataset) - position
        return max(0, min(self.batch_size, left // self.world_size))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The identity of the data: the dataset's own ``fingerprint``, or its length."""
        return getattr(self.dataset, "fingerprint", {"samples": len(self.dataset)})

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out; the same on every rank."""
        return {"seed": self.seed, "consumed": self.consumed, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, with its seed. Raises ``RunMismatch`` for other data."""
        if state.keys() != self.state_dict().keys():
            raise RunMismatch(
                f"the run's loader was not holdfast.loader: it kept {', '.join(map(str, state))}. Give the one that it"
                " was trained with, or start a run in another directory."
            )
        there, here = state["fingerprint"], self.fingerprint
        others = [key for key, stored in there.items() if here.get(key) != stored]
        if others == ["xxh3"] and "content" in there:  # of a Corpus: names, and where files end
            raise RunMismatch(
                "the files have the text that the run was trained on, but other names, order or boundaries, which are"
                " part of the run. Restore them, or start a run in another directory."
            )
        if others:
            key = others[0]
            raise RunMismatch(
                f"the data is not what the run was trained on: {key} was {there[key]}, now it is {here.get(key)}."
                " Give the same data, or start a run in another directory."
            )
        self.close()
        self.seed, self.consumed = state["seed"], state["consumed"]


loader = SampleLoader
"""``holdfast.loader``, for any map-style dataset, used as one would use ``DataLoader``."""


class MapDataset(Protocol):
    """Any object with a length and items by index, as ``torch.utils.data.Dataset``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Stack = Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
"""A function that makes a micro-batch of samples."""


def step_loader(
    corpus: Windowed,
    micro_batch_size: int,
    micro_batches: int,
    *,
    seed: int = 0,
    stack: Stack = default_collate,
) -> SampleLoader:
    """Return a loader of optimizer steps: each item is a list of ``micro_batches`` dicts for the model.

    The tensors of each dict have ``micro_batch_size`` rows.
    """
    return SampleLoader(
        corpus.training,
        micro_batch_size * micro_batches,
        seed=seed,
        collate=lambda samples: micro_batches_of(samples, micro_batch_size, stack),
    )


def micro_batches_of(
    samples: Sequence[dict[str, Tensor]], size: int, stack: Stack = default_collate
) -> list[dict[str, Tensor]]:
    """Return ``samples`` stacked ``size`` at a time."""
    return [stack(list(samples[start : start + size])) for start in range(0, len(samples), size)]


class _Samples(Dataset):
    """The dataset for torch's loader, in its workers or here, indexed by a whole batch of sample numbers."""

    def __init__(self, dataset: MapDataset, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        with streams_put_back():
            samples = [self._sample(number) for number in numbers]
            seed_streams(self.seed, numbers[0])
            return self.collate(samples)

    def _sample(self, number: int) -> Any:
        size = len(self.dataset)
        index = sample_index(number, size=size, seed=self.seed)
        seed_streams(self.seed, number // size, index)
        return self.dataset[index]


def _as_it_is(batch: Any) -> Any:
    return batch


def _begun(init: Callable[[int], object] | None, worker: int) -> None:
    """Initialise a worker process.

    Workers of torch end when they see another parent process than at their first look. A worker whose trainer was
    killed before that look would wait for ever, so it exits here.
    """
    started = (
        getattr(multiprocessing.current_process(), "_start_method", None)
        or multiprocessing.get_start_method()
    )
    parent = multiprocessing.parent_process()
    if started != "forkserver" and parent is not None and parent.pid != os.getppid():
        os._exit(1)
    if init is not None:
        init(worker)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size, taken from torch.distributed where they are not given."""
    here, of = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        here, of = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return here if rank is None else rank, of if world_size is None else world_size


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise BadInput(
            f"{type(dataset).__name__} has no length and no items by index, so a position in it could only be found by"
            " reading up to it. Give a map-style dataset, or your own loader with state_dict and load_state_dict."
        )
    if len(dataset) == 0:
        raise BadInput("the dataset has no samples")


def _check_options(num_workers: int, options: dict[str, Any]) -> None:
    if num_workers < 0:
        raise BadInput(f"num_workers = {num_workers} must be 0 or more")
    for name in options:
        if name in OWN:
            instead = (
                "pass collate="
                if name == "collate_fn"
                else "the order follows from seed=, and nothing is dropped"
            )
            raise BadInput(f"{name}= of torch's DataLoader is not taken: {instead}")
    DataLoader(range(1), num_workers=num_workers, **options)  # type: ignore[arg-type]


@contextmanager
def streams_put_back() -> Iterator[None]:
    """Restore the process's generators after the block, whatever is seeded or drawn within it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_streams(*key: int) -> None:
    """Seed the process's generators with ``key``: integers from 0 to ``2**64 - 1``.

    >>> with streams_put_back():
    ...     seed_streams(3, 1)
    ...     first = random.random()
    ...     seed_streams(3, 1)
    ...     first == random.random()
    True
    """
    seed = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(key)}Q", *key))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


ROUNDS = 6


def sample_index(number: int, *, size: int, seed: int) -> int:
    """Return the index, in a dataset of ``size`` samples, of global sample ``number``.

    >>> sorted(sample_index(number, size=5, seed=1) for number in range(5))
    [0, 1, 2, 3, 4]
    """
    epoch, position = divmod(number, size)
    return permute(position, size, seed, epoch)


def permute(position: int, size: int, *key: int) -> int:
    """Return the place of ``position`` in the permutation of ``range(size)`` named by ``key``.

    A Feistel network permutes the next larger 4**half values. A value outside the range goes through the network
    again until it is inside, which keeps the map one-to-one and takes four turns at most on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    value = position
    while True:
        value = _feistel(value, half, key)
        if value < size:
            return value


def _feistel(value: int, half: int, key: tuple[int, ...]) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        mixed = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(key) + 2}Q", *key, turn, right))
        left, right = right, left ^ (mixed & mask)
    return left << half | right
