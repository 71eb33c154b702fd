"""A place in an epoch means the same to another number of ranks where the samples before it are the same."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from holdfast.errors import RunMismatch
from holdfast.integrations.shared.epoch_batches import EpochBatches
from holdfast.integrations.shared.position import Batches


def shards(data, batch, ranks, sampler=None, drop_last=False):
    """The batch samplers of all ranks, as accelerate makes them."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    inner = BatchSampler(sampler or SequentialSampler(data), batch, drop_last)
    return [data_loader.BatchSamplerShard(inner, ranks, rank) for rank in range(ranks)]


def division(data, batch, ranks, accumulation=1, moves=1, **options):
    indices = shards(data, batch, ranks, **options)[0]
    return EpochBatches.of(indices, data, ranks=ranks, accumulation=accumulation, moves=moves)


def done(data, batch, ranks, count):
    """The samples in the first ``count`` batches of all ranks."""
    each = [itertools.islice(indices, count) for indices in shards(data, batch, ranks)]
    return sorted(i for batches in each for indices in batches for i in indices)


@pytest.mark.parametrize("size", [48, 47, 37, 36, 25, 13, 12])
def test_the_batches_of_another_number_of_ranks_have_the_same_samples(size):
    data = range(size)
    for ranks, other in itertools.permutations([1, 2, 3, 4, 6], 2):
        there = division(data, 12 // ranks, ranks)
        for here in (division(data, 12 // other, other), division(data, 6, 1, accumulation=2)):
            if here.ranks == there.ranks:
                continue
            here.refuse_unlike(there, "the run")
            for count in range(there.batches):
                batches = here.count_of(there, count)
                assert done(data, here.batch // here.ranks, here.ranks, batches) == done(
                    data, 12 // ranks, ranks, count
                )
            assert here.count_of(there, there.batches) == here.batches


def seeded(data):
    return RandomSampler(data, generator=torch.Generator())


class Bucketed(SequentialSampler):
    """Of an order that depends on who knows what."""


DATA = range(48)
LIKE = division(DATA, 3, 4)


@pytest.mark.parametrize(
    "there, here, text",
    [
        (LIKE, division(range(47), 6, 2), "the dataset has 47 samples instead of 48"),
        (LIKE, division(DATA, 3, 2), r"has 12 samples \(12 in a batch of all ranks, 1 accumulated\), and here 6 sam"),
        (LIKE, division(DATA, 6, 2, accumulation=2), r"and here 24 samples \(12 in a batch of all ranks, 2 acc"),
        (LIKE, division(DATA, 6, 2, moves=2), "1 time a step in the run and 2 here"),
        (
            division(range(46), 3, 4, drop_last=True),
            division(range(46), 3, 2, accumulation=2, drop_last=True),
            "An epoch of the run has 3 steps, and here 4",
        ),
        (LIKE, division(DATA, 6, 2, sampler=Bucketed(DATA)), "the order of Bucketed may depend on the number"),
        (division(DATA, 3, 4, sampler=Bucketed(DATA)), division(DATA, 6, 2), "the order of Bucketed may depend"),
        (LIKE, division(DATA, 6, 2, sampler=seeded(DATA)), "reads the order of the dataset, and this script"),
        (
            division(DATA, 12, 1, sampler=RandomSampler(DATA)),
            division(DATA, 6, 2, sampler=seeded(DATA)),
            "give the DataLoader a generator= from the beginning",
        ),
    ],
)  # fmt: skip
def test_what_means_another_place_is_refused(there, here, text):
    with pytest.raises(RunMismatch, match=text) as error:
        here.refuse_unlike(there, "the run")
    assert str(error.value).startswith(f"the run was trained by {there.ranks} rank")


def test_a_count_that_ends_within_a_batch_is_refused():
    with pytest.raises(
        RunMismatch, match="12 samples of the epoch are done, and batches of 24 do not end there"
    ):
        division(DATA, 12, 2).count_of(LIKE, 1)


def test_one_process_takes_the_generator_of_the_run():
    alone = division(DATA, 12, 1, sampler=RandomSampler(DATA))
    alone.refuse_unlike(division(DATA, 3, 4, sampler=seeded(DATA)), "the run")


def test_the_samplers_of_lightning_are_known():
    sampler = DistributedSampler(DATA, 4, 0)
    found = EpochBatches.of(BatchSampler(sampler, 3, False), DATA, ranks=4)
    assert (found.batch, found.batches, found.order) == (12, 4, "an order by seed and epoch")
    sampler = DistributedSampler(DATA, 4, 0, shuffle=False)
    assert EpochBatches.of(BatchSampler(sampler, 3, False), DATA, ranks=4).order == "the order of the dataset"
    subset = SubsetRandomSampler(DATA, torch.Generator())
    assert "generator" in EpochBatches.of(BatchSampler(subset, 3, False), DATA, ranks=1).order


def test_a_step_splits_the_batches_that_a_script_gives_for_all_ranks():
    data_loader = pytest.importorskip("accelerate.data_loader")
    inner = BatchSampler(SequentialSampler(DATA), 12, False)
    split = data_loader.BatchSamplerShard(inner, 4, 0, split_batches=True)
    assert EpochBatches.of(split, DATA, ranks=4).batch == 12


def batches_of(samples=8):
    return Batches(DataLoader(range(samples), batch_size=2), num_ranks=1)


def test_a_pass_that_was_left_has_ended_and_its_saved_place_lies_within_it():
    batches = batches_of()
    for batch in batches:
        if batch[0] == 2:
            break
    assert (batches.epoch, batches.count) == (1, 0)
    found = batches.state_dict()
    assert (found["epoch"], found["count"]) == (0, 2)
    batches.end_left_pass()
    found = batches.state_dict()
    assert (batches.epoch, found["epoch"], found["count"]) == (1, 1, 0)
    assert len(list(batches)) == 4 and batches.epoch == 2


def test_a_peek_before_a_resume_counts_no_pass():
    whole = batches_of()
    list(whole)
    begun = iter(whole)
    next(begun)
    again = batches_of()
    peek = iter(again)
    next(peek)
    again.load_state_dict(whole.state_dict())
    again.resumed()
    del peek
    assert again.epoch == 1
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6, 7]]
    assert again.epoch == 2
