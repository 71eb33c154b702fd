"""What tests leave out: no test, and the same cases each time."""

from __future__ import annotations

import pytest

from combined import one_in, thinned

CASES = [f"{test}[{case}-{way}]" for test in "abc" for case in range(100) for way in "xy"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_about_one_in_n_cases_is_kept_and_of_each_test_the_first(n):
    kept = thinned(["alone", *CASES], n)
    assert kept == thinned(["alone", *CASES], n)
    firsts = [f"{test}[{case}-x]" for test in "abc" for case in range(20)]
    assert all(thinned([first, *CASES], n)[0] == first for first in ["alone", *firsts])
    for part in ("a[", "b[", "c[", "x]", "y]"):
        found = sum(part in name for name in kept) / sum(part in name for name in CASES)
        assert found == pytest.approx(1 / n, rel=0.25)


def test_one_in_n_has_each_pair_of_all_kinds_but_one_and_each_value_of_that(monkeypatch):
    monkeypatch.setattr("combined.WHOLE", False)
    found = one_in(4, range(4), "abc", "xy")
    assert len(found) == 6
    assert {each[1:] for each in found} == {(one, other) for one in "abc" for other in "xy"}
    assert {each[0] for each in found} == set(range(4))
