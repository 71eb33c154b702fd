"""Batches are the sampler's own, and the generators are what they are told to be when a batch is asked for."""

import torch
from torch.utils.data import BatchSampler

from holdfast.integrations.shared.position import WatchedBatches
from holdfast.state.progress import random_state


def drawn_with_each(batches):
    """The batches of an epoch, each with a number drawn while it is made."""
    return [(batch, torch.rand(()).item()) for batch in batches]


def test_batches_are_those_of_the_sampler():
    inner = BatchSampler(range(7), 3, drop_last=False)
    batches = WatchedBatches(inner)
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6]] and len(batches) == 3
    assert batches.batch_size == 3 and batches.newest[0] == 2


def test_a_batch_is_made_again_with_its_own_numbers_and_the_next_with_others():
    batches = WatchedBatches(BatchSampler(range(7), 3, drop_last=False))
    torch.manual_seed(1)
    iterator = iter(batches)
    next(iterator), torch.rand(())
    next(iterator)
    _, before = batches.newest
    torch.manual_seed(2)
    after = random_state()
    expected = [torch.rand(()).item()]  # drawn with the last batch
    torch.manual_seed(1)
    expected = [torch.rand(2)[1].item(), *expected]

    torch.manual_seed(3)
    batches.replay_generators(1, [before, after])
    assert [number for _, number in drawn_with_each(batches)][1:] == expected
    torch.manual_seed(3)
    unset = drawn_with_each(batches)  # of the epoch after
    torch.manual_seed(3)
    assert [number for _, number in unset] == [torch.rand(()).item() for _ in range(3)]


def test_the_generators_are_set_behind_the_last_batch_too():
    batches = WatchedBatches(BatchSampler(range(6), 3, drop_last=False))
    torch.manual_seed(5)
    after = random_state()
    expected = torch.rand(())
    batches.replay_generators(1, [random_state(), after])
    list(batches)
    assert torch.equal(torch.rand(()), expected)
