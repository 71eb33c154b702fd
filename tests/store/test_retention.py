"""Retention keeps what it promises for every history of runs, resumes and goings-back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.manifest import CommitRef, Timeline
from holdfast.store.retention import dropped, lineage


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
