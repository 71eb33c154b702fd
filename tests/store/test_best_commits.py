"""The ranking of commits keeps what it promises for every order of values."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.commit.retention import Keep, dropped, is_better, kept_for_good, ranked
from holdfast.store.format.manifest import CommitRef, Manifest, Timeline
from holdfast.store.pushing import Pusher

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


def unwanted(commits, timelines, keep):
    """The steps that a copy in a bucket does not keep."""
    pusher = Pusher.__new__(Pusher)
    pusher._keep = keep
    return {ref.step for ref in pusher._unwanted({m.ref: m for m in commits}, timelines)[0]}


def test_copy_keeps_the_best_of_an_abandoned_line_until_the_new_one_is_there():
    timelines = {1: Timeline(1, key="a"), 2: Timeline(2, 1, 4, "b", "a")}
    keep = Keep(1, best=1, metric="loss")
    commits = [at(4, 3.0), at(8, 1.0), at(9, None), at(6, None, timeline=2)]
    assert unwanted(commits, timelines, keep) == {9}
    assert unwanted([*commits, at(8, None, timeline=2)], timelines, keep) == {6, 8, 9}


def test_copy_keeps_the_newest_certified_commit():
    commits = [replace(at(step, None), progress={"certified": 3}) for step in (2, 4, 6, 8)]
    assert unwanted(commits, {1: Timeline(1)}, Keep(1)) == {4, 6}
    assert unwanted([*commits, at(9, None)], {1: Timeline(1)}, Keep(1)) == {2, 4, 6, 8}
