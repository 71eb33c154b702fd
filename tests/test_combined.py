"""The part of all combinations that tests take."""

from __future__ import annotations

import itertools

import pytest

from combined import covering, one_in, spread


def test_one_in_n_has_each_pair_of_all_kinds_but_one_and_each_value_of_that(monkeypatch):
    monkeypatch.setattr("combined.CAMPAIGN", False)
    found = one_in(4, range(4), "abc", "xy")
    assert len(found) == 6
    assert {each[1:] for each in found} == {(one, other) for one in "abc" for other in "xy"}
    assert {each[0] for each in found} == set(range(4))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_a_spread_has_as_many_as_asked_for_and_none_twice(n):
    assert len(set(spread(n, range(4)))) == min(n, 4)


def test_each_value_of_each_parameter_is_covered():
    cases = [{"one": one, "other": other} for one in range(6) for other in range(3)]
    chosen = [cases[place] for place in covering(cases)]
    assert {case["one"] for case in chosen} == set(range(6))
    assert {case["other"] for case in chosen} == set(range(3))
    assert len(chosen) == 6


def test_each_pair_of_values_is_covered():
    cases = [{"one": one, "other": other, "third": n} for one in "abc" for other in "abc" for n in range(2)]
    chosen = [cases[place] for place in covering(cases, 2)]
    for names in itertools.combinations(cases[0], 2):
        assert {tuple(case[n] for n in names) for case in chosen} == {
            tuple(c[n] for n in names) for c in cases
        }
    assert len(chosen) < 12
