"""A position counts samples of all ranks, so it survives any change of batch or world size."""

import itertools

import pytest
import torch

import holdfast.data.loader as module
from holdfast.data.corpus import Corpus
from holdfast.data.loader import SampleLoader, step_loader
from holdfast.errors import BadInput, RunMismatch


def take(loader, batches):
    return [batch.tolist() for batch in itertools.islice(loader, batches)]


def flat(batches):
    return [value for batch in batches for value in batch]


def test_an_epoch_is_a_permutation_and_the_next_is_another():
    loader = SampleLoader(range(10), 5)
    first, second = flat(take(loader, 2)), flat(take(loader, 2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_batch_straddles_two_epochs_and_drops_nothing():
    samples = flat(take(SampleLoader(range(7), 3), 7))
    assert [sorted(samples[epoch * 7 : (epoch + 1) * 7]) for epoch in range(3)] == [list(range(7))] * 3


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("batch_size, world_size", [(4, 1), (2, 2), (1, 4), (2, 1), (1, 2), (3, 1)])
def test_after_a_resume_under_any_batch_or_world_size_the_samples_are_the_same(cut, batch_size, world_size):
    uninterrupted = flat(take(SampleLoader(range(11), 1, seed=3), 60))
    before = SampleLoader(range(11), 4, seed=3)
    take(before, cut)
    ranks = [
        SampleLoader(range(11), batch_size, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for rank in ranks:
        rank.load_state_dict(before.state_dict())
    continued = flat(flat(zip(*(take(rank, 8) for rank in ranks), strict=True)))
    assert continued == uninterrupted[cut * 4 : cut * 4 + len(continued)]
    assert len(continued) == 8 * batch_size * world_size


def test_the_position_is_after_the_batch_in_hand_and_iterating_anew_goes_on():
    loader = SampleLoader(range(100), 8)
    first = take(loader, 1)
    assert loader.state_dict()["consumed"] == 8
    assert first + take(loader, 1) == take(SampleLoader(range(100), 8), 2)
    assert loader.state_dict()["consumed"] == 16


def test_a_sample_that_cannot_be_read_does_not_move_the_position():
    class Broken:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            raise OSError("gone")

    loader = SampleLoader(Broken(), 2)
    with pytest.raises(OSError, match="gone"):
        next(loader)
    assert loader.consumed == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_epochs_every_rank_ends_after_the_same_number_of_equal_batches(size, world_size):
    ranks = [SampleLoader(range(size), 2, rank=r, world_size=world_size, epochs=2) for r in range(world_size)]
    batches = [take(rank, 100) for rank in ranks]
    assert len({tuple(map(len, rank)) for rank in batches}) == 1
    seen = flat(flat(batches))
    assert len(seen) == 2 * size - (2 * size) % world_size
    assert all(seen.count(value) <= 2 for value in seen)


def test_a_loader_resumed_at_its_end_is_at_its_end():
    loader = SampleLoader(range(5), 2, epochs=1)
    assert len(take(loader, 9)) == 3
    again = SampleLoader(range(5), 2, epochs=1)
    again.load_state_dict(loader.state_dict())
    assert take(again, 9) == []


def test_other_data_is_refused_by_what_differs():
    state = SampleLoader(range(10), 2).state_dict()
    with pytest.raises(RunMismatch, match="samples was 10, now it is 11"):
        SampleLoader(range(11), 2).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"batch_size": 2, "rank": 1}, {"batch_size": 2, "rank": -1}]
)
def test_what_is_no_share_of_a_batch_is_refused(wrong):
    with pytest.raises(BadInput, match="not a share of a batch"):
        SampleLoader(range(10), **wrong)


def test_no_samples_are_refused():
    with pytest.raises(BadInput, match="no samples"):
        SampleLoader([], 2)


def test_the_public_name_is_the_class():
    assert module.loader is SampleLoader


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").write_bytes(torch.randint(0, 256, (500,)).to(torch.uint8).numpy().tobytes())
    return Corpus(str(tmp_path / "text"), context=8, validation_fraction=0.1)


def test_a_step_is_a_list_of_micro_batches_for_the_model(corpus):
    step = next(step_loader(corpus, 3, 4))
    assert len(step) == 4
    for micro_batch in step:
        assert set(micro_batch) == {"tokens", "targets"}
        assert micro_batch["tokens"].shape == micro_batch["targets"].shape == (3, 8)
        assert micro_batch["tokens"].dtype == torch.int64
        assert torch.equal(micro_batch["tokens"][:, 1:], micro_batch["targets"][:, :-1])


def test_the_same_samples_come_however_a_step_is_divided(corpus):
    def tokens(size, count):
        step = next(step_loader(corpus, size, count, seed=5))
        return torch.cat([micro_batch["tokens"] for micro_batch in step])

    assert torch.equal(tokens(12, 1), tokens(3, 4))
    ranks = [SampleLoader(corpus.training, 6, seed=5, rank=rank, world_size=2) for rank in (0, 1)]
    assert torch.equal(tokens(12, 1), torch.cat([next(rank)["tokens"] for rank in ranks]))
    assert not torch.equal(tokens(12, 1), tokens(12, 1)[torch.arange(11, -1, -1)])


def test_training_never_sees_a_held_out_window(corpus):
    loader = step_loader(corpus, len(corpus.training), 2)
    seen = {tuple(row) for micro_batch in next(loader) for row in micro_batch["tokens"].tolist()}
    held_out = {tuple(sample["tokens"].tolist()) for sample in corpus.validation}
    assert len(held_out) == len(corpus.validation) == 6
    assert seen.isdisjoint(held_out)
    assert len(seen) == len(corpus.training)


def test_another_text_is_refused_on_resume(corpus, tmp_path):
    state = step_loader(corpus, 2, 2).state_dict()
    (tmp_path / "text").write_bytes(bytes(501))
    other = Corpus(str(tmp_path / "text"), context=8, validation_fraction=0.1)
    with pytest.raises(RunMismatch, match="bytes was 500, now it is 501"):
        step_loader(other, 2, 2).load_state_dict(state)
    longer = Corpus(str(tmp_path / "text"), context=16)
    with pytest.raises(RunMismatch, match="context was 8, now it is 16"):
        step_loader(longer, 2, 2).load_state_dict(state | {"fingerprint": {"context": 8}})
