"""The tuner finds the steps between bases that the model calls best, follows it when the machine changes, and keeps to
its limits. The clock is simulated."""

import random
from dataclasses import replace

import pytest

from holdfast.schedule.interval.snapshot_interval import Limits, bounds, optimum
from holdfast.schedule.interval.tuner import ENOUGH, FIRST_STEPS, WARM_STEPS, Tuner, prior
from holdfast.schedule.interval.waste import host_bytes, waste

FULL, RECORD, BYTES_PER_STEP = 1_500_000_000, 5_000_000, 64 << 20
LIMITS = Limits(storage_bytes=30 * FULL)


class Machine:
    """A run on it: each base stalls training for a part of the time that its bytes take."""

    def __init__(self, tuner, seed=0, step_seconds=0.4, rate=1e9, noise=0.1, stalled=0.2):
        self.tuner, self.chance, self.noise = tuner, random.Random(seed), noise
        self.step_seconds, self.rate, self.stalled = step_seconds, rate, stalled
        self.step = self.begun_at = 0
        self.changes = []

    def about(self, value):
        return value * self.chance.uniform(1 - self.noise, 1 + self.noise)

    def train(self, bases):
        """Until so many bases more have been made."""
        while bases:
            self.step += 1
            self.tuner.stepped(self.about(self.step_seconds), 0.0)
            self.tuner.wrote(RECORD, self.about(RECORD / self.rate))
            if self.step - self.begun_at >= self.tuner.steps:
                self.begun_at, bases = self.step, bases - 1
                self.tuner.wrote(FULL, self.about(FULL / self.rate))
                self.tuner.based(FULL, 23, self.about(self.stalled * FULL / self.rate))
            change = self.tuner.retuned()
            if change is not None:
                self.changes.append(change)

    @property
    def true(self):
        """What a perfect measurement would say; of what no run measures, what is believed."""
        return replace(
            self.tuner.measured, step_seconds=self.step_seconds, write_bytes_per_second=self.rate, base_steps=23,
            base_stall_seconds=self.stalled * FULL / self.rate, replay_seconds=self.step_seconds / 10,
            record_stall_seconds=0.0,
        )  # fmt: skip


def tuner(told=None, limits=LIMITS):
    return Tuner(told, limits, prior(FULL, RECORD, BYTES_PER_STEP, 2e9))


def test_before_anything_is_measured_it_is_a_hundred_steps():
    fresh = tuner()
    assert fresh.steps == FIRST_STEPS == 100
    for _ in range(WARM_STEPS - 1):
        fresh.stepped(60.0, 0.0)
        assert fresh.retuned() is None
    fresh.stepped(60.0, 0.0)
    assert fresh.retuned() is not None  # a step takes a minute, so a hundred are too many to replay


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("seed", range(5))
def test_it_comes_within_ten_percent_of_the_optimum_and_again_after_a_drop_of_bandwidth(seed):
    machine = Machine(tuner(), seed)
    for rate in (1e9, 2.5e8, 1e9):
        machine.rate = rate
        machine.train(12)
        best = optimum(machine.true, LIMITS).steps
        assert abs(machine.tuner.steps / best - 1) <= 0.1, (rate, best)
    assert optimum(replace(machine.true, base_stall_seconds=1.2), LIMITS).steps > 1.5 * best


@pytest.mark.parametrize("rate", [1e9, 2.5e8])
def test_what_it_comes_to_wastes_little_more_than_any_other_number(rate):
    machine = Machine(tuner(), rate=rate, noise=0.0)
    machine.train(12)
    found = waste(machine.true, machine.tuner.steps).total
    grid = {round(1.05**k) for k in range(250)} - {0}
    assert found <= 1.02 * min(waste(machine.true, steps).total for steps in grid)


def test_noise_makes_no_number_flap():
    machine = Machine(tuner(), noise=0.05)
    machine.train(10)
    settled = len(machine.changes)
    machine.train(40)
    assert len(machine.changes) - settled <= 3


def test_a_change_is_by_enough():
    machine = Machine(tuner())
    for rate in (1e9, 2.5e8, 5e8):
        machine.rate = rate
        machine.train(6)
    assert machine.changes
    for change in machine.changes:
        assert max(change.steps, change.was) > ENOUGH * min(change.steps, change.was)


@pytest.mark.parametrize(
    "limit, limits",
    [
        ("recovery time", replace(LIMITS, recovery_seconds=8.0)),
        ("storage", replace(LIMITS, storage_bytes=4 * FULL)),
        ("bandwidth share", replace(LIMITS, bandwidth_share=0.0138)),
    ],
)
def test_its_limits_are_kept(limit, limits):
    machine = Machine(tuner(limits=limits), noise=0.0)
    machine.train(8)
    found = optimum(machine.true, limits)
    assert limit in found.binding
    for bound in bounds(machine.true, limits):
        kept = machine.tuner.steps >= bound.value if bound.low else machine.tuner.steps <= bound.value
        assert kept, bound
    assert machine.changes[-1].relaxed == ()


def test_a_limit_that_cannot_be_kept_is_left_out_and_said():
    machine = Machine(tuner(limits=replace(LIMITS, recovery_seconds=0.1)), noise=0.0)
    machine.train(4)
    assert machine.changes[-1].relaxed == ("recovery time",)
    assert machine.tuner.steps == pytest.approx(optimum(machine.true, LIMITS).steps, rel=0.1)


def test_where_records_alone_are_too_much_for_the_disk_bases_are_as_rare_as_may_be():
    machine = Machine(tuner(), noise=0.0, rate=1e7)
    machine.train(3)
    assert machine.changes[-1].relaxed == ("bandwidth share",)
    most = [
        bound.value for bound in bounds(machine.true, LIMITS) if bound.limit in ("recovery time", "storage")
    ]
    assert machine.tuner.steps == pytest.approx(min(most), rel=0.1)


def test_what_was_told_stays():
    machine = Machine(tuner(told=37))
    machine.train(5)
    assert machine.tuner.steps == 37 and not machine.changes


def test_a_run_that_is_often_restarted_makes_more_bases():
    calm, shaky = tuner(), tuner()
    shaky.restarted(3600.0, 12)
    machines = Machine(calm, noise=0.0), Machine(shaky, noise=0.0)
    for machine in machines:
        machine.train(6)
    assert shaky.steps < calm.steps / 2


def test_a_measured_replay_goes_before_the_guess():
    quick = tuner()
    quick.replayed(FULL, 1.0, 100, 0.5)
    assert quick.measured.replay_seconds == pytest.approx(0.005)
    assert quick.measured.read_bytes_per_second == pytest.approx(FULL)


def test_a_time_between_failures_that_was_given_is_believed_whatever_restarts_show():
    told = Tuner(None, LIMITS, prior(FULL, RECORD, BYTES_PER_STEP, 2e9), 600.0)
    by_restarts = tuner()
    for each in (told, by_restarts):
        each.restarted(30 * 24 * 3600.0, 3)
        each.ran(3600.0)
    assert told.measured.mean_seconds_between_failures == 600.0
    assert by_restarts.measured.mean_seconds_between_failures > 24 * 3600
    machines = [Machine(each, noise=0.0) for each in (told, by_restarts)]
    for machine in machines:
        machine.train(8)
        best = optimum(machine.true, LIMITS).steps
        assert abs(machine.tuner.steps / best - 1) <= 0.1
    assert machines[0].tuner.steps < machines[1].tuner.steps / 5


def test_records_are_counted_as_they_are_written_and_memory_as_they_are_captured():
    """Of an embedding of which steps touch a tenth, say."""
    limits = replace(LIMITS, recovery_seconds=1e9)
    dense, sparse = tuner(limits=limits), tuner(limits=limits)
    dense.records_are(200_000_000)
    sparse.records_are(20_000_000, captured_bytes=200_000_000)
    before, after = ({b.limit: b.value for b in bounds(each.measured, limits)} for each in (dense, sparse))
    assert after["storage"] > 9 * before["storage"] > 0
    assert host_bytes(sparse.measured) == host_bytes(dense.measured)
    sparse.records_are(0, captured_bytes=200_000_000)
    assert sparse.measured.record_bytes == 20_000_000, "nothing was written since"
