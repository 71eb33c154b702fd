"""The order of samples: a permutation in every epoch, different in each, at no cost in memory."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.loader import sample_index


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_sample_once(size, seed, epoch):
    numbers = range(epoch * size, (epoch + 1) * size)
    assert sorted(sample_index(n, size=size, seed=seed) for n in numbers) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        return tuple(sample_index(epoch * 50 + n, size=50, seed=seed) for n in range(50))

    orders = {order(seed, epoch) for seed, epoch in itertools.product(range(5), range(5))}
    assert len(orders) == 25


def test_neighbours_are_scattered_evenly():
    """Of 4096 samples the first 512 drawn fall into each eighth of the text about equally often."""
    counts = [0] * 8
    for n in range(512):
        counts[sample_index(n, size=4096, seed=0) // 512] += 1
    assert min(counts) > 40
    assert max(counts) < 90


def test_the_order_never_changes_between_versions():
    assert [sample_index(n, size=10, seed=7) for n in range(12)] == [3, 5, 4, 0, 9, 6, 1, 7, 8, 2, 5, 8]


def test_a_huge_dataset_costs_no_more_than_a_small_one():
    size = 10**15
    assert 0 <= sample_index(5 * size + 3, size=size, seed=1) < size
