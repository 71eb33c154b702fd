"""Several samples in one row, so that next to no token of a micro-batch is padding.

Positions begin anew with every sample, and without an attention mask the models of transformers read them as a
block-diagonal attention. Which samples a step has is a function of the position in the run alone: samples are taken in
their seeded order, each goes to the fullest row that has room for it, and the step ends before the first that no row
has room for. So the position stays the number of samples that all ranks have consumed, and it means the same with or
without packing, at any size of micro-batches and any number of ranks. Called by ``holdfast train``.

``packing_fault`` finds out whether a model keeps the samples of a row apart. Where it does not, ``packs`` is set to
False, and the samples of a step are sorted by their length before they are divided into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from .loader import SampleLoader, micro_batches_of, sample_index, streams_put_back
from .tokens import IGNORED, Tokens

Sample = dict[str, Tensor]
"""``input_ids`` and ``labels``, int64[tokens]."""
PROBED = 16
"""The first targets of a sample that are compared; what another sample leaves behind shows most there."""
LEAK, CHANGE = (1e-6, 2e-3), (1e-5, 3e-2)
"""Accepted relative differences in fp32 and in 16 bits: of a sample beside another one, and of one alone."""


class PackedLoader(SampleLoader):
    """Steps of packed rows: each item is a list of ``micro_batches`` dicts of ``micro_batch_size`` rows.

    A row has at most ``text.context`` tokens. ``packs = False`` gives as many samples as rows instead, sorted by
    length and padded.
    """

    def __init__(
        self,
        text: Tokens,
        micro_batch_size: int,
        micro_batches: int,
        *,
        packs: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Prepare the loader; ``micro_batches`` is the number of this rank."""
        super().__init__(
            text.training,
            micro_batch_size * micro_batches,
            seed=seed,
            rank=rank,
            world_size=world_size,
            collate=self._sorted,
        )
        self.text, self.packs, self.micro_batch_size = text, packs, micro_batch_size

    def __next__(self) -> Any:
        if not self.packs:
            return super().__next__()
        every = self.batch_size * self.world_size
        rows, count = packed_rows(self.length, self.consumed, every, self.text.context)
        mine = rows[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
        with streams_put_back():
            read = [[self.sample(number) for number in row] for row in mine]
        size = self.micro_batch_size
        batch = [
            packed_batch(read[start : start + size], self.text.pad) for start in range(0, len(read), size)
        ]
        self.consumed += count
        return batch

    def length(self, number: int) -> int:
        """Return the number of tokens of sample ``number`` of the run."""
        return self.text.length(self.text.training.number(self._index(number)))

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` of the run."""
        return self.text.training[self._index(number)]

    def _index(self, number: int) -> int:
        return sample_index(number, size=len(self.text.training), seed=self.seed)

    def _sorted(self, samples: list[Sample]) -> list[Sample]:
        ordered = sorted(samples, key=lambda sample: len(sample["input_ids"]))
        return micro_batches_of(ordered, self.micro_batch_size, self.text.stack)


def packed_rows(
    length_of: Callable[[int], int], first: int, num_rows: int, room: int
) -> tuple[list[list[int]], int]:
    """Return the numbers of the samples of each row, and how many samples there are in all.

    Args:
        length_of: The tokens of a sample, by its number; none has more than ``room``.
        first: The number of the first sample.
        num_rows: The rows of all ranks.
        room: The tokens of a row.

    >>> packed_rows([3, 4, 2, 1, 5].__getitem__, 0, 2, 5)
    ([[0, 2], [1, 3]], 4)
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    left, number = [room] * num_rows, first
    while True:
        length = length_of(number)
        fitting = [row for row in range(num_rows) if left[row] >= length]
        if not fitting:
            return rows, number - first
        fullest = min(fitting, key=left.__getitem__)
        rows[fullest].append(number)
        left[fullest] -= length
        number += 1


def packed_batch(rows: Sequence[Sequence[Sample]], pad: int) -> Sample:
    """Return a micro-batch of packed rows: ``input_ids``, ``labels`` and ``position_ids``, int64[rows, tokens].

    The first token of a sample is no target, since the one before it is of another sample. Padding at the end of a row
    has positions of its own, as if it were one more sample. There is no ``attention_mask``: with one, transformers
    would not look at the positions.
    """
    longest = max(sum(len(sample["input_ids"]) for sample in row) for row in rows)
    made: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        labels = [sample["labels"].clone() for sample in row]
        for each in labels:
            each[:1] = IGNORED
        padding = longest - sum(map(len, labels))
        made["input_ids"].append(torch.cat([*(s["input_ids"] for s in row), _full(padding, pad)]))
        made["labels"].append(torch.cat([*labels, _full(padding, IGNORED)]))
        made["position_ids"].append(torch.cat([torch.arange(n) for n in (*map(len, labels), padding)]))
    return {key: torch.stack(each) for key, each in made.items()}


def packing_fault(
    loss_of: Callable[[Sample], float],
    samples: Sequence[Sample],
    text: Tokens,
    choices: int,
    *,
    exact: bool,
    num_rows: int = 1,
) -> str:
    """Return how a model fails to keep the samples of a row apart; an empty text if it does not.

    Args:
        loss_of: The mean loss of a micro-batch, without dropout. Called three times.
        samples: Two samples; of each, at most half a row is used.
        text: The text that they are of.
        choices: The number of tokens of the model.
        exact: True if the model computes in fp32.
        num_rows: The rows of a micro-batch. Two are compared at most: some kernels heed positions in one row alone.
    """
    before, ids = (sample["input_ids"][: text.context // 2] for sample in samples)
    labels = ids.clone()
    labels[PROBED + 1 :] = IGNORED
    labels[0] = IGNORED
    sample, none = {"input_ids": ids, "labels": labels}, torch.full_like(before, IGNORED)
    beside, other = (
        loss_of(packed_batch([[{"input_ids": each, "labels": none}, sample]] * min(num_rows, 2), text.pad))
        for each in (before, (before + 1) % choices)
    )
    alone = loss_of(text.stack([sample]))
    leak, change = LEAK[not exact], CHANGE[not exact]
    if not abs(beside - other) <= leak * max(1.0, abs(other)):
        return f"the loss of a sample is {beside:.6g} or {other:.6g}, by what stands before it in its row"
    if not abs(beside - alone) <= change * max(1.0, abs(alone)):
        return f"the loss of a sample is {beside:.6g} in a row with others, and {alone:.6g} alone"
    return ""


def takes_positions(model: Any) -> bool:
    """Return whether ``model`` has an argument ``position_ids``, without which no packing is possible."""
    base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # PEFT's
    return "position_ids" in signature(base.forward).parameters


def _full(length: int, value: int) -> Tensor:
    return torch.full((length,), value, dtype=torch.int64)
