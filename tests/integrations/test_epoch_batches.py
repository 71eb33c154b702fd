"""A place in an epoch means the same to another number of ranks where the samples before it are the same."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from holdfast.errors import RunMismatch
from holdfast.integrations.shared.changed_attributes import data_objects
from holdfast.integrations.shared.epoch_batches import EpochBatches
from holdfast.integrations.shared.position import Batches
from holdfast.state.encoding import decode, encode
from support.drawing import Draws, Masks, Shuffles


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


@pytest.mark.parametrize("is_ahead", [True, False])
def test_data_that_draws_by_itself_continues(is_ahead):
    """Also the batch that was made and not handed out, which a loader of accelerate is ahead."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    kind = data_loader.DataLoaderShard if is_ahead else DataLoader

    def script():
        samples = [{"input_ids": torch.full((4,), 100 * i)} for i in range(20)]
        indices = BatchSampler(Shuffles(len(samples)), 2, drop_last=False)
        return Batches(kind(Draws(samples), batch_sampler=indices, collate_fn=Masks()), 1)

    alone, left, resumed = script(), script(), script()
    whole = [batch["input_ids"] for _ in range(2) for batch in alone]
    for _ in left:
        pass
    for _, _ in zip(range(3), left, strict=False):
        state = json.loads(json.dumps(encode(left.state_dict())))
    resumed.load_state_dict(decode(state))
    resumed.resumed()
    found = [batch["input_ids"] for batch in resumed]
    assert len(found) == 7 and all(map(torch.equal, found, whole[13:]))


def evaluates(dataset, collator):
    collator([dataset[0]])


def sets_a_stage(dataset, collator):
    dataset.num_made = 40


def starts_again(dataset, collator):
    dataset.num_made = 0


@pytest.mark.parametrize("change", [evaluates, sets_a_stage, starts_again])
def test_data_continues_as_it_was_left_after_the_batch_that_was_made_ahead(change):
    """A loop may draw from the collator, and set up the dataset, while that batch waits."""
    data_loader = pytest.importorskip("accelerate.data_loader")

    def script():
        dataset = Draws([{"input_ids": torch.full((4,), 100 * i)} for i in range(20)])
        collator = Masks()
        return (
            dataset,
            collator,
            Batches(data_loader.DataLoaderShard(dataset, batch_size=2, collate_fn=collator), 1),
        )

    dataset, collator, alone = script()
    whole = []
    for number, batch in enumerate(alone):
        whole.append(batch["input_ids"])
        if number == 2:
            change(dataset, collator)
            state = json.loads(json.dumps(encode(alone.state_dict())))
    _, _, resumed = script()
    resumed.load_state_dict(decode(state))
    resumed.resumed()
    found = [batch["input_ids"] for batch in resumed]
    assert len(found) == 7 and all(map(torch.equal, found, whole[3:]))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_the_run_had_not_draws_as_its_script_does(rank, monkeypatch):
    """With the first rank's generators it would augment its samples by the same numbers."""

    def script(ranks):
        samples = [{"input_ids": torch.zeros(4, dtype=torch.long)} for _ in range(16)]
        dataset = Draws(samples)
        dataset.generator = np.random.default_rng(dist.get_rank() if ranks > 1 else 0)
        indices = shards(samples, 4 // ranks, ranks)[0]
        return dataset, Batches(DataLoader(dataset, batch_sampler=indices), ranks)

    trained, batches = script(1)
    next(iter(batches))
    state = decode(json.loads(json.dumps(encode(batches.state_dict()))))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda *_: rank)
    resumed, again = script(2)
    again.load_state_dict(state)
    again.resumed()
    expected = np.random.default_rng(1) if rank else trained.generator
    assert resumed.generator.bit_generator.state == expected.bit_generator.state
    assert resumed.num_made == 4


class Slots:
    """A sampler without a ``__dict__``."""

    __slots__ = ()

    def __iter__(self):
        return iter([3, 1, 2, 0])

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [3, 1, 2, 0]},
        {"sampler": range(4)},
        {"sampler": np.arange(4)},
        {"sampler": Slots()},
        {"batch_sampler": [[0, 1], [2, 3]]},
    ],
)
def test_samplers_without_attributes_are_sampled_from(options):
    loader = DataLoader(range(4), **options)
    batches = Batches(loader, num_ranks=1)
    assert [batch.tolist() for batch in batches] == [
        batch.tolist() for batch in DataLoader(range(4), **options)
    ]


class Collates(torch.nn.Module):
    """A model whose method collates, or a collator that is a module."""

    def __init__(self):
        super().__init__()
        self.weight, self.num_made = torch.nn.Parameter(torch.zeros(2)), 0

    def collate(self, samples):
        self.num_made += 1
        return torch.tensor(samples)

    def forward(self, samples):
        return self.collate(samples)


@pytest.mark.parametrize("is_model", [True, False])
def test_a_resume_keeps_the_parameters_of_a_module_that_collates(is_model):
    """Optimizers hold them. What a model counts in attributes is kept with the model."""

    def script():
        module = Collates()
        loader = DataLoader(range(8), 2, collate_fn=module.collate if is_model else module)
        return module, Batches(loader, 1, watched=module.modules() if is_model else ())

    trained, batches = script()
    for _, _ in zip(range(2), batches, strict=False):
        trained.weight.data = trained.weight + 1
        state = json.loads(json.dumps(encode(batches.state_dict())))
    resumed, again = script()
    held = resumed.weight
    again.load_state_dict(decode(state))
    again.resumed()
    assert resumed.weight is held and not held.any()
    assert resumed.num_made == (0 if is_model else 2)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_model_that_collates_by_its_generator_makes_the_batch_ahead_again(is_early):
    data_loader = pytest.importorskip("accelerate.data_loader")

    class Model(Collates):
        generator = None

        def collate(self, samples):
            self.generator = self.generator or torch.Generator().manual_seed(2)
            return torch.rand((), generator=self.generator) + super().collate(samples)

    def script():
        model = Model()
        model.generator = torch.Generator().manual_seed(1) if is_early else None
        loader = data_loader.DataLoaderShard(range(16), batch_size=2, collate_fn=model.collate)
        return model, Batches(loader, 1, watched=model.modules())

    model, alone = script()
    whole = []
    for number, batch in enumerate(alone):
        whole.append(batch)
        if number == 2:
            state = json.loads(json.dumps(encode(alone.state_dict())))
            now = model.generator.get_state()
    model, resumed = script()
    resumed.load_state_dict(decode(state))
    model.generator = torch.Generator()  # as a trainer restores the model's attributes
    model.generator.set_state(now)
    resumed.resumed()
    found = [*resumed]
    assert len(found) == 5 and all(map(torch.equal, found, whole[3:]))


class Grouped:
    """Code that collates has attributes, too, and they are no state."""

    latest = 0

    def __init__(self, samples):
        Grouped.latest = samples[0]

    @classmethod
    def made(cls, samples):
        cls.latest = samples[0]
        return samples


class Answers:
    """A collator that has an attribute of any name, each time another object."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Answers()


@pytest.mark.parametrize("collate", [Grouped, Grouped.made, np.array])
def test_code_that_collates_has_no_state(collate):
    assert [*data_objects(DataLoader(Draws([]), 2, collate_fn=collate))] == ["dataset"]


@pytest.mark.timeout(20)
def test_a_collator_of_any_attributes_is_one_object():
    assert [*data_objects(DataLoader(Draws([]), 2, collate_fn=Answers()))] == ["dataset", "collator"]
