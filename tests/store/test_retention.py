"""Retention keeps what it promises for every history of runs, resumes and goings-back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.store.commit.retention import Keep, dropped, kept_for_good, lineage
from holdfast.store.format.manifest import CommitRef, Manifest, Timeline


def refs(*pairs):
    return [CommitRef(timeline, step) for timeline, step in pairs]


TIMELINES = {1: Timeline(1), 2: Timeline(2, 1, 3), 3: Timeline(3, 2, 5), 4: Timeline(4, 2, 4)}


def test_a_line_follows_the_forks_back():
    commits = refs((1, 1), (1, 3), (1, 4), (2, 4), (2, 5), (2, 6), (3, 6), (4, 5))
    assert lineage(commits, TIMELINES, 3) == refs((3, 6), (2, 5), (2, 4), (1, 3), (1, 1))
    assert lineage(commits, TIMELINES, 4) == refs((4, 5), (2, 4), (1, 3), (1, 1))
    assert lineage(commits, TIMELINES, 1) == refs((1, 4), (1, 3), (1, 1))


def test_a_line_back_to_an_even_earlier_step_skips_what_lies_between():
    timelines = {1: Timeline(1), 2: Timeline(2, 1, 8), 3: Timeline(3, 2, 2)}
    assert lineage(refs((1, 1), (1, 2), (1, 5), (2, 9)), timelines, 3) == refs((1, 2), (1, 1))


def test_a_line_from_nothing_has_no_commits():
    assert lineage(refs((1, 1)), {1: Timeline(1), 2: Timeline(2)}, 2) == []


def test_the_newest_of_the_line_stay():
    commits = refs((1, 1), (1, 2), (1, 3))
    assert dropped(commits, TIMELINES, 1, retain=2, room=2) == refs((1, 1))
    assert dropped(commits, TIMELINES, 1, retain=3, room=3) == []


def test_what_was_left_stays_while_there_is_room_and_too_few_of_ones_own():
    commits = refs((1, 2), (1, 3), (1, 4))
    assert dropped(commits, TIMELINES, 2, retain=2, room=3) == []
    assert dropped(commits, TIMELINES, 2, retain=2, room=2) == refs((1, 4))
    commits = refs((1, 3), (1, 4), (2, 4))
    assert dropped(commits, TIMELINES, 2, retain=2, room=3) == []
    commits = refs((1, 3), (1, 4), (2, 4), (2, 5))
    assert dropped(commits, TIMELINES, 2, retain=2, room=4) == refs((1, 3), (1, 4))


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), unique=True),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_the_newest_retain_of_the_line_are_never_dropped_and_the_room_is_kept(pairs, tip, retain, more):
    commits = refs(*pairs)
    drop = dropped(commits, TIMELINES, tip, retain=retain, room=retain + more)
    kept = set(commits) - set(drop)
    line = lineage(commits, TIMELINES, tip)
    assert set(line[:retain]) <= kept
    assert len(kept) <= retain + more
    assert not set(line[retain:]) & kept
    assert drop == sorted(drop)


def of(*steps, hours=()):
    """Manifests of a line, made an hour apart, or at ``hours``."""
    times = hours or range(len(steps))
    return [
        Manifest(step, 1, None, None, "", None, {}, {}, {}, created=3600.0 * hour, writer={})
        for step, hour in zip(steps, times, strict=True)
    ]


def test_the_first_of_each_so_many_steps_is_kept_for_good():
    line = of(0, 90, 110, 190, 205, 300, 399)
    assert {ref.step for ref in kept_for_good(line, Keep(1, every=100))} == {110, 205, 300}
    assert kept_for_good(line, Keep(1)) == set()


def test_the_first_of_each_so_many_hours_is_kept_for_good():
    line = of(1, 2, 3, 4, 5, hours=(0.1, 0.9, 2.5, 3.9, 4.0))
    assert {ref.step for ref in kept_for_good(line, Keep(1, hours=2))} == {1, 3, 5}
    assert {ref.step for ref in kept_for_good(line, Keep(1, hours=0.5))} == {1, 2, 3, 4, 5}


@given(st.sets(st.integers(0, 500), min_size=1), st.integers(1, 3), st.integers(1, 60))
def test_what_is_kept_for_good_stays_as_the_line_grows(steps, last, every):
    """Retired one by one, as a run does it: what the policy keeps is what it would keep of the whole line."""
    keep, kept = Keep(last, every=every), []
    for manifest in of(*sorted(steps)):
        kept.append(manifest)
        drop = dropped(
            [m.ref for m in kept], {}, 1, retain=last, room=last, for_good=kept_for_good(kept, keep)
        )
        kept = [m for m in kept if m.ref not in drop]
    whole = of(*sorted(steps))
    expected = kept_for_good(whole, keep) | {m.ref for m in whole[-last:]}
    assert {m.ref for m in kept} == expected


def test_what_is_damaged_does_not_count_and_goes():
    commits = refs((1, 1), (1, 2), (1, 3), (1, 4))
    assert dropped(commits, TIMELINES, 1, retain=2, room=2, damaged=refs((1, 3))) == refs((1, 1), (1, 3))


@pytest.mark.parametrize(
    "options", [{"last": 0}, {"last": 1.5}, {"last": None}, {"every": 0}, {"hours": 0}, {"hours": -1.0}]
)
def test_a_policy_that_keeps_nothing_is_refused(options):
    with pytest.raises(BadInput, match=f"Keep.{next(iter(options))}="):
        Keep(**options)
