"""Units are shared out among drives as these take them, in every stretch of blocks."""

from __future__ import annotations

import random

import pytest

from holdfast.offload.setup.drive_setup import shares_of_state, spread


@pytest.mark.parametrize("seed", range(20))
def test_no_drive_is_ever_further_from_its_share_than_a_unit_or_two(seed):
    """Of all ranks in step, each with its own sizes, one that has nothing among them, and of each by itself."""
    rng = random.Random(seed)
    num_ranks = seed % 4 + 1
    rates = [rng.choice([1, 2, 3.5, 7]) for _ in range(rng.randint(1, 5))]
    shares = [rate / sum(rates) for rate in rates]
    num_units = rng.randint(0, 120)
    sizes = [[rng.choice([4096, 8192, 999 * 4096]) for _ in range(num_units)] for _ in range(num_ranks)]
    sizes[-1] = sizes[-1] if seed % 8 < 4 else [0] * num_units
    places = spread(sizes, shares)
    placed = [[0] * len(rates) for _ in sizes]
    for unit in range(num_units):
        for rank, own in enumerate(placed):
            own[places[rank][unit]] += sizes[rank][unit]
        for each in [*placed, [sum(column) for column in zip(*placed, strict=True)]]:
            for share, there in zip(shares, each, strict=True):
                assert abs(there - share * sum(each)) <= 3 * 999 * 4096


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.5, 0.25), (0.25, 0.25, 0.25, 0.25)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_four_units_of_all_ranks_and_all_units_of_a_rank_are_as_the_shares(num_ranks, shares):
    places = spread([[8] * 24] * num_ranks, shares)
    for start in range(0, 24, 4):
        stretch = [drive for own in places for drive in own[start : start + 4]]
        assert [stretch.count(drive) / len(stretch) for drive in range(len(shares))] == [*shares]
    for parts in zip(*places, strict=True) if len(set(shares)) == 1 else ():
        counts = [parts.count(drive) for drive in range(len(shares))]
        assert max(counts) - min(counts) <= 1, "of one unit"
    for own in places:
        assert [own.count(drive) / 24 for drive in range(len(shares))] == [*shares]


def test_a_drive_without_a_share_has_nothing():
    for places in spread([[5] * 30] * 3, [0.0, 0.5, 0.5]):
        assert set(places) == {1, 2}


def test_what_lies_on_the_first_drive_anyway_counts_as_its_part():
    for rates, state, others in ([2.0, 1.0, 3.0], 700, 90), ([1.0, 1.0], 100, 0), ([4.0, 1.0], 1000, 100):
        shares = shares_of_state(rates, state, others)
        seconds = [
            (share * state + (others if drive == 0 else 0)) / rate
            for drive, (share, rate) in enumerate(zip(shares, rates, strict=True))
        ]
        assert sum(shares) == pytest.approx(1) and seconds == pytest.approx([seconds[0]] * len(rates))
    assert shares_of_state([1.0, 1.0, 1.0], 100, 1000) == (0.0, 0.5, 0.5)
    assert shares_of_state([1.0, 3.0], 0, 10) == (0.25, 0.75)
    assert shares_of_state([5.0], 10, 10) == (1.0,)
