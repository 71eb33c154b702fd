"""Units are shared out among drives as these take them, in every stretch of blocks."""

from __future__ import annotations

import random

import pytest

from holdfast.plan.drives import shares_of_state, spread


@pytest.mark.parametrize("seed", range(20))
def test_no_drive_is_ever_further_from_its_share_than_a_unit_or_two(seed):
    rng = random.Random(seed)
    rates = [rng.choice([1, 2, 3.5, 7]) for _ in range(rng.randint(1, 5))]
    shares = [rate / sum(rates) for rate in rates]
    sizes = [rng.choice([4096, 8192, 999 * 4096]) for _ in range(rng.randint(0, 120))]
    placed, total = [0] * len(rates), 0
    for size, drive in zip(sizes, spread(sizes, shares), strict=True):
        placed[drive] += size
        total += size
        for share, there in zip(shares, placed, strict=True):
            assert abs(there - share * total) <= 2 * 999 * 4096


def test_a_drive_without_a_share_has_nothing():
    assert set(spread([5] * 30, [0.0, 0.5, 0.5])) == {1, 2}


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
