"""The best cadence: against every other one, against simulated failures, and at each limit."""

import random
from dataclasses import replace
from math import inf

import pytest

from holdfast.errors import DoesNotFit
from holdfast.schedule.interval.snapshot_interval import MOST_STEPS, Limits, bounds, optimum, storage_cap
from holdfast.schedule.interval.tuner import Estimates
from holdfast.schedule.interval.waste import (
    MeasuredCosts,
    closed_form,
    recovery_seconds,
    storage_bytes,
    waste,
)
from plan_failures import simulate
from schedule.test_waste import LOWDIFF, RUN

FREE = Limits(recovery_seconds=1e9, storage_bytes=10**18, host_bytes=10**15, bandwidth_share=1.0)


def some_run(seed):
    chance = random.Random(seed)
    return MeasuredCosts(
        step_seconds=chance.uniform(0.1, 2),
        full_bytes=chance.randrange(10**8, 10**10),
        record_bytes=chance.randrange(10**5, 10**7),
        write_bytes_per_second=chance.uniform(2e8, 4e9),
        read_bytes_per_second=chance.uniform(2e8, 4e9),
        base_stall_seconds=chance.uniform(0.01, 1),
        base_steps=chance.randrange(1, 20),
        record_stall_seconds=chance.uniform(0, 0.02),
        sync_seconds=chance.uniform(0, 0.02),
        write_slowdown=chance.uniform(0, 0.5),
        replay_seconds=chance.uniform(0.005, 0.1),
        restart_seconds=chance.uniform(0, 100),
        mean_seconds_between_failures=chance.uniform(100, 3000),
    )


@pytest.mark.campaign(keep=7)
@pytest.mark.parametrize("seed", range(20))
def test_no_other_cadence_is_better(seed):
    m = some_run(seed)
    limits = replace(FREE, bandwidth_share=0.9)
    found = optimum(m, limits)
    low = max(bound.value for bound in bounds(m, limits) if bound.low)
    others = range(max(int(low), 1), 4 * found.steps + 100)
    assert found.steps == min(others, key=lambda steps: waste(m, steps).total)
    assert found.waste == waste(m, found.steps)


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("mean", [60, 600])
@pytest.mark.parametrize("seed", [3, 5, 7])
def test_on_simulated_failures_it_is_within_2_percent_of_the_best_of_a_grid(seed, mean):
    m = replace(some_run(seed), mean_seconds_between_failures=mean)
    found = optimum(m, FREE)
    assert_within_2_percent(m, found.steps, FREE)


def assert_within_2_percent(m, steps, limits):
    low = max(bound.value for bound in bounds(m, limits) if bound.low)
    grid = [round(steps * 2 ** (p / 4)) for p in range(-12, 13)]
    grid = [point for point in grid if point >= low]
    assert len(grid) > 10
    wasted = {n: simulate(m, n, num_failures=2000).wasted_per_hour for n in [*grid, steps]}
    best = min(wasted, key=wasted.get)
    assert wasted[steps] <= 1.02 * wasted[best], (steps, best)


@pytest.mark.slow
def test_after_a_fourfold_drop_of_bandwidth_it_is_the_best_again():
    """Stalls, reads and writes are those of a disk; what is known of them are noisy measurements."""
    before = replace(RUN, mean_seconds_between_failures=600, base_stall_seconds=0.3, write_slowdown=0.5)
    after = replace(
        before, write_bytes_per_second=1.25e8, read_bytes_per_second=2.5e8, base_stall_seconds=1.2
    )
    estimates, noise = Estimates(before), random.Random(0)
    start = optimum(before, FREE)
    for _ in range(30):
        for name in ("write_bytes_per_second", "read_bytes_per_second"):
            estimates.saw(name, 1e7, 1e7 / getattr(after, name) * noise.uniform(0.9, 1.1))
        estimates.saw("base_stall_seconds", 1.2 * noise.uniform(0.9, 1.1))
    current = optimum(estimates.measured, FREE)
    assert current.steps > 1.5 * start.steps
    assert_within_2_percent(after, current.steps, FREE)
    wasted = [simulate(after, found.steps).wasted_per_hour for found in (start, current)]
    assert wasted[0] > 1.04 * wasted[1]  # so that it had to be found anew


def test_without_limits_it_is_near_the_closed_form():
    m = replace(LOWDIFF, step_seconds=0.1, replay_seconds=0.01, mean_seconds_between_failures=3600.0)
    assert optimum(m, FREE).steps == pytest.approx(closed_form(m), rel=0.03)


TIGHT = {
    "recovery time": ("recovery_seconds", 10.0),
    "storage": ("storage_bytes", 6_000_000_000),
    "bandwidth share": ("bandwidth_share", 0.045),
}
FAILING = replace(RUN, mean_seconds_between_failures=3600.0)


def keeps(limit, m, limits, steps):
    """Whether ``steps`` between bases keep to one of the limits, as its own definition has it."""
    rate = (m.record_bytes + m.full_bytes / steps) / m.step_seconds
    return {
        "recovery time": recovery_seconds(m, steps) <= limits.recovery_seconds,
        "storage": storage_bytes(m, steps, limits.retain) <= storage_cap(m, limits),
        "bandwidth share": rate <= limits.bandwidth_share * m.write_bytes_per_second,
        "making a base": steps >= m.base_steps,
    }[limit]


@pytest.mark.parametrize("limit", TIGHT)
def test_a_limit_is_kept_to_and_named_and_used_up(limit):
    field, value = TIGHT[limit]
    limits = replace(FREE, **{field: value})
    found, free = optimum(FAILING, limits), optimum(FAILING, FREE)
    assert found.binding == (limit,)
    assert keeps(limit, FAILING, limits, found.steps)
    assert not keeps(limit, FAILING, limits, free.steps)
    assert not keeps(limit, FAILING, limits, found.steps + (1 if free.steps > found.steps else -1))
    assert found.waste.total > free.waste.total


def test_a_base_is_not_due_before_the_last_is_made():
    often = replace(RUN, base_stall_seconds=0, write_slowdown=0, mean_seconds_between_failures=600)
    found = optimum(often, FREE)
    assert found.binding == ("making a base",)
    assert found.steps == 23


def test_where_no_limit_is_in_the_way_none_is_named():
    assert optimum(RUN, FREE).binding == ()


def test_limits_that_are_equally_tight_are_both_named():
    storage = storage_bytes(FAILING, 60, 2)
    recovery = recovery_seconds(FAILING, 60) + 1e-6
    found = optimum(FAILING, replace(FREE, storage_bytes=storage, recovery_seconds=recovery))
    assert found.steps == 60
    assert set(found.binding) == {"storage", "recovery time"}


def test_limits_are_kept_to_in_any_run():
    tried = 0
    for seed in range(100):
        m, chance = some_run(seed), random.Random(seed)
        limits = Limits(
            recovery_seconds=chance.uniform(10, 100),
            storage_bytes=int(m.full_bytes * chance.uniform(3, 8)),
            host_bytes=int(m.full_bytes / m.base_steps + chance.uniform(1, 20) * m.record_bytes),
            bandwidth_share=chance.uniform(0.1, 1),
        )
        try:
            found = optimum(m, limits)
        except DoesNotFit:
            continue
        tried += 1
        names = {bound.limit for bound in bounds(m, limits)}
        assert {name for name in names if not keeps(name, m, limits, found.steps)} == set()
        assert set(found.binding) <= names
    assert tried > 50


@pytest.mark.parametrize("seed", range(20))
def test_what_a_limit_allows_is_all_that_keeps_to_it(seed):
    m, chance = some_run(seed), random.Random(seed)
    limits = Limits(
        recovery_seconds=chance.uniform(60, 100),
        storage_bytes=int(m.full_bytes * chance.uniform(4, 8)),
        host_bytes=m.full_bytes * 2,
        bandwidth_share=chance.uniform(0.5, 1),
    )
    for bound in bounds(m, limits):
        outside = bound.value + (-1 if bound.low else 1)
        for value, kept in ((bound.value, True), (outside, False)):
            assert value < 1 or keeps(bound.limit, m, limits, value) == kept, (bound, kept)


def test_no_simulated_recovery_is_longer_than_allowed():
    limits, atomic = replace(FREE, recovery_seconds=10.0), replace(FAILING, base_steps=1)
    found = optimum(atomic, limits)
    assert 9 < simulate(atomic, found.steps, num_failures=2000).longest_recovery_seconds <= 10.0


def test_nor_where_a_failure_puts_off_a_base():
    limits = replace(FREE, recovery_seconds=10.0)
    found = optimum(FAILING, limits)
    assert 8.5 < simulate(FAILING, found.steps, num_failures=2000).longest_recovery_seconds <= 10.0


def test_storage_has_a_cap_by_itself():
    heavy = replace(RUN, record_bytes=100_000_000, mean_seconds_between_failures=86400)
    found = optimum(heavy, Limits())
    assert found.binding[0] == "storage"
    assert storage_bytes(heavy, found.steps, 2) <= 20 * heavy.full_bytes


def test_without_any_reason_for_a_base_there_is_still_one():
    free = replace(RUN, replay_seconds=0, read_bytes_per_second=inf, record_bytes=0)
    assert optimum(free, FREE).steps == pytest.approx(MOST_STEPS, abs=8)


@pytest.mark.parametrize(
    "limits, text",
    [
        (
            {"bandwidth_share": 0.03},
            "records alone take 4.0% of the write bandwidth, and 3.0% of it may be used",
        ),
        ({"storage_bytes": 4_000_000_000}, "bytes of storage are needed then, and 4000000000 are allowed"),
        ({"recovery_seconds": 2.0}, r"recovery takes 4\.\d s then, and 2.0 s are allowed"),
        ({"host_bytes": 80_000_000}, "85217392 bytes of host memory are needed, and 80000000 are allowed"),
        (
            {"bandwidth_share": 0.045, "storage_bytes": 6 * 10**9},
            "at least 1200 steps apart; [0-9]+ bytes of sto",
        ),
    ],
)
def test_limits_that_cannot_be_kept_to_say_what_is_needed(limits, text):
    with pytest.raises(DoesNotFit, match=text):
        optimum(RUN, replace(FREE, **limits))


def test_what_is_said_to_be_needed_is_enough():
    with pytest.raises(DoesNotFit) as refused:
        optimum(RUN, replace(FREE, storage_bytes=4_000_000_000))
    needed = int(str(refused.value).split(" bytes of storage")[0].split()[-1])
    assert optimum(RUN, replace(FREE, storage_bytes=needed)).steps == 23
    with pytest.raises(DoesNotFit):
        optimum(RUN, replace(FREE, storage_bytes=needed - 1))


@pytest.mark.parametrize(
    "field, value",
    [
        ("recovery_seconds", 0),
        ("storage_bytes", 0),
        ("host_bytes", 0),
        ("bandwidth_share", 0),
        ("bandwidth_share", 1.5),
        ("retain", 0),
    ],
)
def test_limits_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field}.* must"):
        Limits(**{field: value})
