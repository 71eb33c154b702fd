"""The part of all combinations that tests take."""

from __future__ import annotations

import pytest

from combined import one_in, spread


def test_one_in_n_has_each_pair_of_all_kinds_but_one_and_each_value_of_that(monkeypatch):
    monkeypatch.setattr("combined.CAMPAIGN", False)
    found = one_in(4, range(4), "abc", "xy")
    assert len(found) == 6
    assert {each[1:] for each in found} == {(one, other) for one in "abc" for other in "xy"}
    assert {each[0] for each in found} == set(range(4))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_a_spread_has_as_many_as_asked_for_and_none_twice(n):
    assert len(set(spread(n, range(4)))) == min(n, 4)


def test_a_spread_of_two_kinds_differs_in_both():
    pairs = [(one, other) for one in range(6) for other in "abc"]
    ones, others = zip(*spread(3, pairs), strict=True)
    assert len(set(ones)) == len(set(others)) == 3
