"""The ranking of commits keeps what it promises for every order of values."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.commit.best_commits import is_better, ranked
from holdfast.store.commit.retention import Keep, dropped, kept_for_good
from holdfast.store.format.manifest import CommitRef, Manifest

NUMBERS = st.one_of(st.none(), st.floats(-3, 3).map(lambda x: round(x)), st.just(math.nan), st.just(math.inf))


def at(step, value, timeline=1):
    progress = {} if value is None else {"metrics": {"loss": value}}
    return Manifest(step, timeline, None, None, "", None, {}, {}, progress, created=float(step), writer={})


@given(st.lists(NUMBERS, min_size=1), st.integers(1, 3), st.sampled_from(["min", "max"]))
def test_best_of_a_run_stay_as_it_grows(values, best, mode):
    """Retired one by one, as a run does it: what stays is what sorting all of the run gives."""
    keep, kept = Keep(1, best=best, metric="loss", mode=mode), []
    sign = 1 if mode == "min" else -1
    for step, value in enumerate(values):
        kept.append(at(step, value))
        gone = dropped([m.ref for m in kept], {}, 1, retain=1, room=1, for_good=kept_for_good(kept, keep))
        kept = [m for m in kept if m.ref not in gone]
    numbers = [(sign * v, step) for step, v in enumerate(values) if v is not None and not math.isnan(v)]
    expected = {step for _, step in sorted(numbers)[:best]} | {len(values) - 1}
    assert {m.step for m in kept} == expected


@given(st.lists(NUMBERS, max_size=6), NUMBERS.filter(lambda v: v is not None), st.integers(1, 3))
def test_value_is_better_if_it_would_be_ranked_among_them(values, value, best):
    line = [at(step, each) for step, each in enumerate(values)]
    after = ranked([*line, at(len(values), value)], "loss", "min")[:best]
    assert is_better(line, "loss", "min", best, value) == (CommitRef(1, len(values)) in after)


def test_step_that_two_timelines_made_counts_once():
    line = [at(3, 1.0), at(3, 1.0, timeline=2), at(5, 2.0, timeline=2)]
    assert ranked(line, "loss", "min") == [CommitRef(1, 3), CommitRef(2, 5)]


def test_metrics_of_another_form_have_no_rank():
    odd = [at(1, "low"), at(2, True), at(3, None)]
    odd.append(Manifest(4, 1, None, None, "", None, {}, {}, {"metrics": 3}, created=0.0, writer={}))
    assert ranked(odd, "loss", "min") == []
