"""The part of all combinations that tests take."""

from __future__ import annotations

from combined import one_in


def test_one_in_n_has_each_pair_of_all_kinds_but_one_and_each_value_of_that(monkeypatch):
    monkeypatch.setattr("combined.CAMPAIGN", False)
    found = one_in(4, range(4), "abc", "xy")
    assert len(found) == 6
    assert {each[1:] for each in found} == {(one, other) for one in "abc" for other in "xy"}
    assert {each[0] for each in found} == set(range(4))
