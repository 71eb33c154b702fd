"""What failures cost, against plain averages and the formulas of the literature."""

from dataclasses import astuple, replace
from math import inf, nextafter, sqrt

import pytest

from holdfast.schedule.interval.waste import (
    HOUR,
    MeasuredCosts,
    closed_form,
    host_bytes,
    recovery_seconds,
    storage_bytes,
    waste,
)

RUN = MeasuredCosts(
    step_seconds=0.5,
    full_bytes=1_500_000_000,
    record_bytes=10_000_000,
    write_bytes_per_second=5e8,
    read_bytes_per_second=1e9,
    base_stall_seconds=0.6,
    base_steps=23,
    record_stall_seconds=0.01,
    sync_seconds=0.01,
    write_slowdown=0.1,
    replay_seconds=0.06,
    restart_seconds=20,
    mean_seconds_between_failures=7200,
)

LOWDIFF = MeasuredCosts(
    step_seconds=0.001,
    full_bytes=1,
    record_bytes=0,
    write_bytes_per_second=inf,
    read_bytes_per_second=0.5,
    base_stall_seconds=3.0,
    replay_seconds=1e-5,
    restart_seconds=0.0,
    mean_seconds_between_failures=1e6,
)
"""Nothing but what LowDiff's formula has in it, and failures so rare that its first order is all."""
ALONE = replace(RUN, record_bytes=0, record_stall_seconds=0.0, replay_seconds=0.0, base_steps=1)
"""Snapshots without records between."""


def averaged(m, steps, has_records):
    """Lost, load and replay seconds of a failure, averaged over the moments of an interval between two bases."""
    writes = steps if has_records else 1
    stalls = m.base_stall_seconds + steps * m.record_stall_seconds
    nbytes = m.full_bytes + steps * m.record_bytes
    slower = m.write_slowdown * (nbytes / m.write_bytes_per_second + writes * m.sync_seconds)
    wall = (steps * m.step_seconds + stalls + slower) / steps
    moments = [(i + 0.5) / 100 for i in range(100 * steps)]
    durable = [int(x) if has_records else 0 for x in moments]
    lost = sum(x - d for x, d in zip(moments, durable)) / len(moments) * wall
    lost += m.sync_seconds + m.record_bytes / m.write_bytes_per_second
    load = m.full_bytes / m.read_bytes_per_second + (m.base_steps - 1) * m.replay_seconds / 2
    replay = sum(durable) * m.replay_seconds / len(moments)
    return lost, load, replay, wall, stalls / steps, slower / steps


@pytest.mark.parametrize("steps", [10, 41, 250])
@pytest.mark.parametrize("has_records", [True, False])
def test_terms_are_averages_over_an_interval(steps, has_records):
    rare = replace(RUN if has_records else ALONE, mean_seconds_between_failures=1e7)
    found = waste(rare, steps, has_records)
    lost, load, replay, wall, stall, slower = averaged(rare, steps, has_records)
    assert found.lost == pytest.approx(lost * HOUR / 1e7, rel=1e-4)
    assert found.load == pytest.approx(load * HOUR / 1e7, rel=1e-4)
    assert found.replay == pytest.approx(replay * HOUR / 1e7, rel=1e-3, abs=1e-9)
    assert found.restart == pytest.approx(20 * HOUR / 1e7, rel=1e-4)
    assert found.base_stall + found.record_stall == pytest.approx(stall / wall * HOUR, rel=1e-4)
    assert found.base_stall == pytest.approx(0.6 / steps / wall * HOUR, rel=1e-4)
    assert found.contention == pytest.approx(slower / wall * HOUR, rel=1e-4)


def test_an_hour_is_all_that_can_be_wasted():
    for mean in (0.01, 1, 10, 100, 1e4, 1e7):
        found = waste(replace(RUN, mean_seconds_between_failures=mean), 100)
        assert all(0 <= term < HOUR for term in astuple(found))
        assert found.total == pytest.approx(sum(astuple(found)))
        assert 0 < found.total <= nextafter(HOUR, inf)  # a sum of rounded terms
    assert waste(replace(RUN, mean_seconds_between_failures=1), 100).total > 0.99 * HOUR


def test_a_recovery_that_fails_too_is_done_again():
    often = replace(RUN, mean_seconds_between_failures=60, restart_seconds=60)
    found = waste(often, 100)
    per_failure = HOUR / (
        found.restart / 60
    )  # seconds from one failure of training to the next, if once each
    assert per_failure < 60 + 60  # the rest of a restart would be more than the hour has


def test_a_slow_disk_holds_training_to_its_pace():
    slow = replace(RUN, write_bytes_per_second=1e7, mean_seconds_between_failures=1e9)
    found = waste(slow, 100)
    writing = (10_000_000 + 1_500_000_000 / 100) / 1e7 + 0.01  # seconds per step
    assert HOUR / writing * 0.5 == pytest.approx(HOUR - found.total, rel=1e-3)
    assert found.contention > 0.7 * found.total


def lowdiff(m, interval):
    """Wasted share as the paper's model has it for batches of one step, by the seconds between bases."""
    recovery = m.step_seconds / 2 + m.load_seconds + m.replay_seconds / 2 * (interval / m.step_seconds - 1)
    return recovery / m.mean_seconds_between_failures + m.base_stall_seconds / interval


@pytest.mark.parametrize("steps", [24_500_000, 10_000_000, 70_000_000])
def test_with_its_assumptions_it_is_the_model_of_lowdiff(steps):
    share = lowdiff(LOWDIFF, steps * 0.001)
    assert waste(LOWDIFF, steps).total == pytest.approx(share * HOUR, rel=1e-3)


def test_the_closed_form_is_youngs():
    m = replace(RUN, write_slowdown=0, base_steps=1, mean_seconds_between_failures=1e6)
    assert closed_form(m) == pytest.approx(sqrt(2 * 1e6 * 0.6 / (0.5 * 0.06)))


def test_the_closed_form_is_where_waste_is_least_when_failures_are_rare():
    m = replace(RUN, mean_seconds_between_failures=1e6)
    steps = closed_form(m)
    chosen = waste(m, round(steps)).total
    for factor in (0.8, 1.25):
        assert waste(m, round(steps * factor)).total > chosen


def test_without_replay_no_base_is_ever_needed():
    free = replace(RUN, replay_seconds=0, read_bytes_per_second=inf)
    assert closed_form(free) == inf


def test_reading_counts_where_it_is_slower_than_applying():
    slow = replace(RUN, read_bytes_per_second=1e7, base_steps=1)
    assert recovery_seconds(slow, 100) == pytest.approx(150 + 100 * 1.0)


def test_what_a_cadence_takes_at_most():
    assert recovery_seconds(RUN, 100) == pytest.approx(1.5 + 22 * 0.03 + 122 * 0.06)
    assert storage_bytes(RUN, 100, 2) == 3 * 1_500_000_000 + (2 * 122 + 22) * 10_000_000
    assert host_bytes(RUN) == 2 * 10_000_000 + 65_217_392
    assert host_bytes(replace(RUN, record_bytes=400_000_000)) == 800_000_000 * 4 // 3 + 1


@pytest.mark.parametrize(
    "field, value",
    [
        ("step_seconds", 0),
        ("step_seconds", inf),
        ("mean_seconds_between_failures", inf),
        ("write_bytes_per_second", 0),
        ("record_bytes", -1),
        ("sync_seconds", float("nan")),
        ("base_steps", 0),
    ],
)
def test_quantities_are_checked(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        replace(RUN, **{field: value})
