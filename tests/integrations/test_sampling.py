"""Batches are the sampler's own, and the generators are what they are told to be when a batch is asked for."""

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from holdfast.integrations.shared.position import Batches, WatchedBatches
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


class Ahead:
    """A loader that is one batch ahead, as those of trainers are."""

    def __init__(self, batch):
        self.base_dataloader = DataLoader(Noise(), batch)

    def __iter__(self):
        batches = iter(self.base_dataloader)
        batch = next(batches)
        for after in batches:
            yield batch
            batch = after
        yield batch


class Noise(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.stack([torch.tensor(float(i)), torch.rand(())])


def test_another_number_of_ranks_makes_its_next_batch_with_its_own_numbers():
    """The batch that the run was ahead by is another one, made with the numbers before it."""
    torch.manual_seed(1)
    run = Batches(Ahead(4), 1)
    batches = iter(run)
    next(batches)
    state = run.state_dict()
    assert state["pending"] is not None
    other = Batches(Ahead(2), 2, accumulation=2)
    other.load_state_dict(state)
    torch.manual_seed(77)
    other.resumed()
    assert other.count == 2
    batch = next(iter(other))
    torch.manual_seed(77)
    assert batch.tolist() == [[4.0, torch.rand(()).item()], [5.0, torch.rand(()).item()]]
