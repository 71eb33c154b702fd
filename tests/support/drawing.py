"""Datasets, collators and samplers that draw by generators of their own, and count: state that no loader saves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

Sample = dict[str, torch.Tensor]


class Draws(Dataset):
    """``samples``, each with a token that depends on a generator of its own, and on the number of samples made."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.generator, self.num_made = samples, np.random.default_rng(5), 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Sample:
        sample = {name: tokens.clone() for name, tokens in self.samples[i].items()}
        self.num_made += 1
        sample["input_ids"][int(self.generator.integers(len(sample["input_ids"])))] = self.num_made % 50
        return sample


class Masks:
    """A collator whose generator is made when it first draws, as transformers' own is with a seed."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[Sample]) -> Sample:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        made = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        masked = torch.rand(made["input_ids"].shape, generator=self.generator) < 0.3
        return made | {"input_ids": made["input_ids"].masked_fill(masked, 1)}


class Shuffles(Sampler):
    """Another order in each pass, by a generator of its own and the number of passes."""

    def __init__(self, size: int) -> None:
        self.size, self.generator, self.num_passes = size, random.Random(6), 0

    def __iter__(self) -> Iterator[int]:
        order = [*range(self.size)]
        self.generator.shuffle(order)
        self.num_passes += 1
        return iter(order[:: (-1) ** self.num_passes])

    def __len__(self) -> int:
        return self.size
