"""Simulated failures: by hand where it can be done, and against the averages of the model."""

from dataclasses import replace
from math import inf

import pytest

from holdfast.schedule.interval.waste import HOUR, MeasuredCosts, waste
from plan_failures import _Run, simulate
from schedule.test_waste import ALONE, RUN

BY_HAND = MeasuredCosts(
    step_seconds=1.0,
    full_bytes=5,
    record_bytes=0,
    write_bytes_per_second=inf,
    read_bytes_per_second=1.0,
    base_stall_seconds=0.0,
    sync_seconds=0.5,
    replay_seconds=0.1,
)
"""A step takes a second, a write half of one, a load five and a record a tenth."""


def test_what_was_not_durable_is_lost():
    run = _Run(BY_HAND, 10)
    assert run.fail_after(9.2) == pytest.approx(5 + 8 * 0.1)
    assert (run.step, run.base) == (8, 0)  # of 9 steps; the record of the 9th would have been durable at 9.5


def test_a_step_is_durable_when_its_write_is_over():
    run = _Run(BY_HAND, 10)
    run.fail_after(4.4)
    assert run.step == 3
    run.fail_after(4.6)
    assert run.step == 7


def test_without_records_a_base_is_all_that_is_durable():
    run = _Run(BY_HAND, 10, has_records=False)
    assert run.fail_after(10.4) == pytest.approx(5)
    assert (run.step, run.base) == (0, 0)
    assert run.fail_after(19.9) == pytest.approx(5)
    assert (run.step, run.base) == (10, 10)


def test_a_base_ends_the_replay():
    run = _Run(BY_HAND, 10)
    assert run.fail_after(10.6) == pytest.approx(5)
    assert (run.step, run.base) == (10, 10)
    assert run.fail_after(21) == pytest.approx(5)
    assert (run.step, run.base) == (30, 30)


def test_a_base_that_was_being_made_is_made_again():
    run = _Run(replace(BY_HAND, base_steps=3, sync_seconds=0), 10)
    run.fail_after(9.5)
    assert (run.step, run.base) == (9, 0)
    run.fail_after(2.5)  # it needs 3 steps
    assert (run.step, run.base) == (11, 0)
    run.fail_after(3.5)
    assert (run.step, run.base) == (14, 14)


def test_stalls_take_time():
    stalling = replace(
        BY_HAND, base_stall_seconds=4, base_steps=2, record_stall_seconds=1 / 16, sync_seconds=0
    )
    run = _Run(stalling, 8)
    run.fail_after(4.2)
    assert run.step == 3
    run.fail_after(1.1)
    assert run.step == 4
    run.fail_after(8.2)  # four steps, the stalls of their records, and that of a base
    assert (run.step, run.base) == (7, 0)
    run.fail_after(6.1)  # the base that was lost is made again, which takes two steps
    assert (run.step, run.base) == (8, 0)
    run.fail_after(6.2)
    assert (run.step, run.base) == (10, 10)


def test_without_failures_to_speak_of_only_stalls_are_wasted():
    rare = replace(RUN, mean_seconds_between_failures=1e7)
    found = simulate(rare, 50, num_failures=1, seed=1)
    model = waste(rare, 50)
    assert found.wasted_per_hour == pytest.approx(
        model.base_stall + model.record_stall + model.contention, rel=2e-3
    )


def test_a_seed_is_a_run():
    one, again, other = (simulate(RUN, 50, num_failures=50, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_steps_kept_and_time_wasted_make_up_the_whole():
    found = simulate(RUN, 50, num_failures=200)
    kept = found.steps * RUN.step_seconds
    assert found.wasted_per_hour * found.seconds / HOUR + kept == pytest.approx(found.seconds)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("mean", [60, 300, 900])
@pytest.mark.parametrize(
    "steps, has_records",
    [(25, True), (99, True), (400, True), (10, False), (25, False), (100, False), (250, False)],
)
def test_the_model_agrees_with_it(mean, steps, has_records):
    m = replace(RUN if has_records else ALONE, mean_seconds_between_failures=mean)
    found = simulate(m, steps, has_records, num_failures=4000 if has_records else 40_000)
    assert waste(m, steps, has_records).total == pytest.approx(found.wasted_per_hour, rel=0.02)
