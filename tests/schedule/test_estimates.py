"""What is believed of a run, from what is seen of it."""

import random
from dataclasses import replace

import pytest

from holdfast.schedule.interval.tuner import Estimates, mean_between_failures
from schedule.test_waste import RUN


def test_until_something_is_seen_the_prior_is_believed():
    assert Estimates(RUN).measured == RUN


def test_what_is_seen_replaces_the_prior():
    estimates = Estimates(RUN)
    estimates.saw("base_stall_seconds", 0.9)
    estimates.saw("replay_seconds", 2.0, per=64)
    estimates.saw("record_bytes", 1001)
    assert estimates.measured == replace(
        RUN, base_stall_seconds=0.9, replay_seconds=0.03125, record_bytes=1001
    )


def test_newer_observations_weigh_more():
    estimates = Estimates(RUN, keep=0.5)
    for seconds in (1.0, 2.0, 4.0):
        estimates.saw("base_stall_seconds", seconds)
    assert estimates.measured.base_stall_seconds == pytest.approx((0.25 * 1 + 0.5 * 2 + 4) / 1.75)


def test_a_small_write_says_little_of_the_bandwidth():
    estimates = Estimates(RUN)
    estimates.saw("write_bytes_per_second", 1e9, 2.0)
    estimates.saw("write_bytes_per_second", 4096, 0.01)
    assert estimates.measured.write_bytes_per_second == pytest.approx(5e8, rel=0.01)


def test_a_fourfold_drop_of_bandwidth_is_found_within_ten_writes():
    noise = random.Random(0)
    estimates = Estimates(RUN)
    for rate, num_writes in ((5e8, 100), (1.25e8, 10)):
        for _ in range(num_writes):
            estimates.saw("write_bytes_per_second", 1e7, 1e7 / rate * noise.uniform(0.9, 1.1))
        assert estimates.measured.write_bytes_per_second == pytest.approx(rate, rel=0.1)


def test_a_belief_about_failures_gives_way_to_what_happens():
    estimates = Estimates(RUN)  # one in 2 hours
    estimates.ran(3600)
    assert estimates.measured.mean_seconds_between_failures == pytest.approx(3 * 3600)
    estimates.ran(3600, failures=1)
    assert estimates.measured.mean_seconds_between_failures == pytest.approx(4 * 3600 / 2)


def test_the_mean_between_failures_is_that_of_a_gamma_posterior():
    """By the posterior itself: rate^n exp(-rate (M + t)), whose mean is 1 over what is returned."""
    mean, seconds, failures = 2.0, 7.0, 2
    rates = [(i + 0.5) / 1000 for i in range(20_000)]
    belief = [2.718281828459045 ** (-rate * mean) for rate in rates]
    likely = [rate**failures * 2.718281828459045 ** (-rate * seconds) for rate in rates]
    after = [b * p for b, p in zip(belief, likely)]
    expected = sum(rate * weight for rate, weight in zip(rates, after)) / sum(after)
    assert 1 / mean_between_failures(mean, seconds, failures) == pytest.approx(expected, rel=1e-4)


def test_with_many_failures_the_prior_is_forgotten():
    chance = random.Random(0)
    uptimes = [chance.expovariate(1 / 600) for _ in range(2000)]
    assert mean_between_failures(86400, sum(uptimes), len(uptimes)) == pytest.approx(600, rel=0.1)
