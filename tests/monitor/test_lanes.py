"""Lanes: how long each was busy, what binds, and what computing waited for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logged
from holdfast.monitor.lanes import Operation, Timeline, rows_of


def of(spans, seconds=10.0, of_sitting=3):
    return Timeline.of(logged.timeline(spans=spans, seconds=seconds, of_sitting=of_sitting))


def test_each_lane_is_busy_for_what_lies_within_the_step():
    busy = of(logged.SPANS).busy
    assert busy == {
        "compute": 8.0,
        "ssd_read": 2.5,
        "upload": pytest.approx(0.1),
        "update": 0.5,
        "commit": 1.0,
    }


def test_a_wait_is_for_what_ran_meanwhile_back_from_its_end():
    waits = of(logged.SPANS).waits
    assert waits == {"": pytest.approx(0.4), "upload": pytest.approx(0.1), "ssd_read": pytest.approx(1.5)}


def test_a_first_step_is_counted_to_its_very_end():
    timeline = of(logged.SPANS, of_sitting=1)
    assert (timeline.window, timeline.busy["commit"]) == (11.5, 2.5)


def test_the_verdict_names_what_binds_and_what_computing_waits_for():
    said = of(logged.SPANS).verdict()
    assert said == (
        "The busiest is computing, for 80% of the step; nothing is busy all the time."
        " Computing waits for 20% of it, most of all for SSD reads: 15%."
    )
    read = [
        logged.span("ssd_read", "load_params", 0.0, 9.8, 3),
        logged.span("compute", "forward", 9.8, 10.0, 3),
    ]
    assert of(read).verdict() == (
        "The bottleneck is SSD reads: busy for 98% of the step."
        " Computing waits for 98% of it, most of all for SSD reads: 98%."
    )
    shared = [
        logged.span("ssd_read", "load_params", 0.0, 5.0, 3),
        logged.span("ssd_write", "update", 5.0, 10.0, 3),
    ]
    assert (
        of(shared).verdict().startswith("The bottleneck is the SSD, reads and writes together: busy for 100%")
    )
    idle = [logged.span("compute", "forward", 0.0, 3.0, 3)]
    assert of(idle).verdict().startswith("No lane is busy all the time; the busiest is computing, for 30%")
    assert of([]).verdict() == "Nothing was recorded of it."


SPANS = st.lists(
    st.tuples(st.sampled_from(["compute", "ssd_read", "update"]), st.integers(-5, 25), st.integers(0, 9)),
    max_size=12,
)


@given(SPANS)
def test_busy_time_is_that_of_the_seconds_in_which_anything_is_under_way(found):
    timeline = of([logged.span(lane, "update", at, at + long, 3) for lane, at, long in found], seconds=20.0)
    for lane, busy in timeline.busy.items():
        seconds = {second for other, at, long in found if other == lane for second in range(at, at + long)}
        assert busy == len(seconds & set(range(20)))


@given(SPANS)
def test_rows_are_as_many_as_are_under_way_at_once_and_none_overlap(found):
    operations = [Operation(lane, "x", at, at + long + 1, 3, "", -1, -1, 0) for lane, at, long in found]
    rows = rows_of(operations)
    assert sorted(map(id, operations)) == sorted(id(op) for row in rows for op in row)
    assert all(a.end <= b.start for row in rows for a, b in pairwise(row))
    at_once = [sum(op.start <= second < op.end for op in operations) for second in range(-5, 40)]
    assert len(rows) == max(at_once)


def test_what_an_operation_is_reads_as_words():
    [*_, backward, _] = Timeline.of(logged.timeline()).operations
    assert backward.label == "backward, block 0, micro-batch 0"
    assert Timeline.of(logged.timeline()).operations[2].label == "load params, backward, block 0"
