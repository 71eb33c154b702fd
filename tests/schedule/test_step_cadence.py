"""The choice between records of every step, copies in memory and bases alone is that of least waste, is kept, and is
made from steps that count. Nothing here takes time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from holdfast.schedule.interval import step_cadence
from holdfast.schedule.interval.snapshot_interval import Limits
from holdfast.schedule.interval.step_cadence import (
    BLOCK_STEPS,
    COPIED_STEPS,
    HELD_STEPS,
    LEAST_STEPS,
    NUM_ROUNDS,
    WARM_STEPS,
    CadenceChoice,
    StepCadence,
    StepRates,
    choose,
)
from holdfast.schedule.interval.waste import MeasuredCosts, waste

MEASURED = MeasuredCosts(
    step_seconds=0.13, full_bytes=70_000_000, record_bytes=23_000_000, write_bytes_per_second=5e8,
    read_bytes_per_second=2e9, base_stall_seconds=0.02, base_steps=2, replay_seconds=0.015, restart_seconds=0.3,
)  # fmt: skip
LIMITS = Limits()
SHORT = StepRates(plain_seconds=0.13, recorded_seconds=0.16, copy_seconds=0.02)


def after(minutes, measured=MEASURED):
    return replace(measured, mean_seconds_between_failures=60.0 * minutes)


# Choosing


def test_short_steps_with_dear_records_are_kept_by_bases_alone():
    choice = choose(after(60), LIMITS, SHORT)
    assert choice.every > 1
    assert choice.recorded_waste > 0.18 and choice.alone_waste < 0.03
    assert choice.lost_steps == pytest.approx(choice.every / 2 + 70 / 500 / 0.13)


@pytest.mark.parametrize("minutes", [10, 60, 24 * 60])
def test_bases_alone_are_as_far_apart_as_young_says(minutes):
    young = math.sqrt(2 * SHORT.copy_seconds * 60 * minutes) / SHORT.plain_seconds
    assert choose(after(minutes), LIMITS, SHORT).every == pytest.approx(young, rel=0.15)


def test_no_other_number_of_steps_wastes_much_less():
    choice = choose(after(3), LIMITS, SHORT)
    costs = step_cadence._alone(after(3), SHORT)
    wasted = {k: waste(costs, k, has_records=False).total / 3600 for k in range(2, 500)}
    assert choice.alone_waste == pytest.approx(wasted[choice.every])
    assert choice.alone_waste <= 1.01 * min(wasted.values())


def test_long_steps_keep_a_record_of_each():
    """Those of a GPT-2 small on two cores: 4.7 % more, and bases alone would cost a half percent."""
    rates = StepRates(plain_seconds=3.3, recorded_seconds=3.3 * 1.047, copy_seconds=0.7)
    measured = replace(MEASURED, step_seconds=3.3, full_bytes=1_500_000_000, record_bytes=500_000_000)
    choice = choose(after(24 * 60, measured), LIMITS, rates)
    assert choice.every == 1 and choice.alone_waste < choice.recorded_waste < 0.06
    assert choice.lost_steps < 2


def test_records_stay_where_failures_are_so_frequent_that_they_cost_less():
    cheap = SHORT._replace(recorded_seconds=0.135, copy_seconds=0.13)
    choice = choose(after(1), LIMITS, cheap)
    assert choice.every == 1 and choice.recorded_waste < choice.alone_waste


def test_the_choice_changes_only_where_the_other_is_better_by_the_margin():
    def extra(share):
        return SHORT._replace(recorded_seconds=SHORT.plain_seconds * (1 + share))

    between = [extra(share / 1000) for share in range(100)]
    from_records = [choose(after(24 * 60), LIMITS, rates, 1).every > 1 for rates in between]
    from_bases = [choose(after(24 * 60), LIMITS, rates, 500).every > 1 for rates in between]
    leaves, returns = from_records.index(True), from_bases.index(True)
    assert from_records == sorted(from_records) and from_bases == sorted(from_bases)
    assert 0.04 < leaves / 1000 < 0.08
    assert 0.01 < (leaves - returns) / 1000 < 0.03


def test_a_number_that_is_nearly_best_is_kept():
    best = choose(after(60), LIMITS, SHORT).every
    assert choose(after(60), LIMITS, SHORT, round(1.2 * best)).every == round(1.2 * best)
    assert choose(after(60), LIMITS, SHORT, 2 * best).every == best


def test_bases_leave_the_disk_the_bandwidth_that_it_may_use():
    slow = replace(after(1), write_bytes_per_second=50e6)
    limits = replace(LIMITS, bandwidth_share=0.25)
    choice = choose(slow, limits, SHORT, now=2)
    assert choice.every * SHORT.plain_seconds >= 70 / 50 / 0.25


def test_steps_that_are_done_again_are_within_the_time_that_recovery_may_take():
    choice = choose(after(30 * 24 * 60), replace(LIMITS, recovery_seconds=20.0), SHORT)
    assert 1 < choice.every <= 20.0 / SHORT.plain_seconds


def test_a_choice_is_said_with_what_it_costs_and_what_a_failure_loses():
    rates = StepRates(0.5, 0.6, 0.1)
    said = CadenceChoice(40, 0.21, 0.012, 20.3, rates).describe()
    assert said.startswith("a base every 40 steps (20.0 s), and no records between.")
    assert "cost 1.2% of the time; a record of every step would cost 21.0%" in said
    assert said.endswith("A failure loses about 20 steps.")
    assert CadenceChoice(1, 0.01, 0.02, 0.5, rates).describe().startswith("a record of every step.")


HELD = SHORT._replace(held_seconds=0.012)


@pytest.mark.parametrize("minutes", [0.1, 1])
def test_frequent_failures_of_processes_are_met_by_copies_in_memory(minutes):
    choice = choose(after(minutes), LIMITS, HELD)
    young = math.sqrt(2 * 0.012 * 60 * minutes) / HELD.plain_seconds
    assert choice.copies == pytest.approx(young, rel=0.2, abs=1) and choice.every > 10 * choice.copies
    assert choice.copied_waste is not None
    assert choice.copied_waste < min(choice.alone_waste, choice.recorded_waste) - 0.005
    assert choice.lost_steps == pytest.approx(choice.copies / 2 + 0.012 / 0.13)


def test_bases_beside_copies_are_as_far_apart_as_losses_of_the_machine_ask_for():
    day, often = (choose(after(1), LIMITS, HELD, machine_seconds=3600.0 * hours) for hours in (24, 4))
    assert day.every == pytest.approx(math.sqrt(2 * 0.02 * 24 * 3600) / 0.13, rel=0.15)
    assert often.every == pytest.approx(math.sqrt(2 * 0.02 * 4 * 3600) / 0.13, rel=0.15)


def test_machines_that_fail_as_often_as_processes_get_no_copies():
    dear = HELD._replace(held_seconds=0.3)
    assert choose(after(10), LIMITS, dear, machine_seconds=600.0).copies == 0


@pytest.mark.parametrize("held, steps", [(0.012, 100), (0.13, 200)])
def test_seldom_failures_leave_copies_for_half_a_percent_and_not_in_each_hundredth_step(held, steps):
    choice = choose(after(24 * 60), LIMITS, SHORT._replace(held_seconds=held))
    assert (choice.copies, choice.lost_steps) == (steps, pytest.approx(steps / 2 + held / 0.13))
    assert choice.copied_waste is not None and choice.copied_waste < choice.alone_waste + 0.01


@pytest.mark.slow
def test_copies_that_cost_a_point_more_than_bases_alone_are_not_begun_and_are_left():
    def kept(held, copies):
        return choose(after(24 * 60), LIMITS, SHORT._replace(held_seconds=held), 500, copies).copies > 0

    costs = [n / 10 for n in range(1, 200)]
    begins, stays = ([kept(held, copies) for held in costs] for copies in (0, 300))
    assert begins == sorted(begins, reverse=True) and stays == sorted(stays, reverse=True)
    assert 0 < sum(begins) < sum(stays) < len(costs)


def test_rare_failures_of_long_steps_keep_records_where_there_could_be_copies():
    rates = StepRates(plain_seconds=3.3, recorded_seconds=3.3 * 1.047, copy_seconds=0.7, held_seconds=0.4)
    measured = replace(MEASURED, step_seconds=3.3, full_bytes=1_500_000_000, record_bytes=500_000_000)
    choice = choose(after(24 * 60, measured), LIMITS, rates)
    assert (choice.every, choice.copies) == (1, 0) and choice.copied_waste is not None


def test_copies_are_left_only_where_something_else_is_better_by_the_margin():
    def kept(extra, now, copies):
        rates = HELD._replace(recorded_seconds=HELD.plain_seconds * (1 + extra / 1000))
        return choose(after(1), LIMITS, rates, now, copies).copies > 0

    begins = [kept(extra, 1, 0) for extra in range(100)]
    stays = [kept(extra, 500, 9) for extra in range(100)]
    assert begins == sorted(begins) and stays == sorted(stays)
    assert 0.005 < (begins.index(True) - stays.index(True)) / 1000 < 0.02


def test_a_number_of_steps_between_copies_that_is_nearly_best_is_kept():
    best = choose(after(1), LIMITS, HELD).copies
    assert choose(after(1), LIMITS, HELD, 500, round(1.2 * best)).copies == round(1.2 * best)
    assert choose(after(1), LIMITS, HELD, 500, 2 * best).copies == best


def test_copies_are_said_with_what_each_kind_of_failure_loses():
    rates = StepRates(0.5, 0.6, 0.1, 0.05)
    said = CadenceChoice(400, 0.21, 0.12, 4.2, rates, 8, 0.03).describe()
    assert said.startswith("a copy in memory every 8 steps (4.0 s), and a base every 400 steps (3 min 20 s).")
    assert (
        "cost 3.0% of the time; a record of every step would cost 21.0% and bases alone would cost 12.0%."
        in said
    )
    assert said.endswith("The death of the process loses about 4 steps, that of the machine about 200 steps.")


# Measuring


def train(cadence, plain=0.1, recorded=0.15, copy=0.4, stall=0.05, held=0.0, waited=0.0, odd=()):
    """Until a choice is to be made. Yields nothing of it; returns the steps that it took, and how each was kept."""
    kinds = []
    for step in range(1000):
        due = not cadence.records and cadence.is_due(step, -1, exactly=False)
        in_memory = cadence.is_copy_due(step)
        kinds.append("recorded" if cadence.records else "copied" if due else "held" if in_memory else "plain")
        seconds = (
            (recorded if cadence.records else plain) + (copy if due else 0.0) + (9.0 if step in odd else 0.0)
        ) + in_memory * held
        if cadence.stepped(seconds, waited if cadence.records else stall if due else 0.0, due):
            return kinds
    raise AssertionError("nothing was to be chosen")


def test_what_steps_and_bases_take_is_measured_in_a_few_rounds():
    cadence = StepCadence(None)
    assert cadence.records and cadence.is_measuring and cadence.rates is None
    kinds = train(cadence)
    assert cadence.rates == pytest.approx(StepRates(0.1, 0.15, 0.4))
    assert len(kinds) == WARM_STEPS + NUM_ROUNDS * (2 * BLOCK_STEPS + COPIED_STEPS) <= 120
    assert kinds.count("copied") == NUM_ROUNDS


def test_a_record_takes_no_less_than_training_waited_for_it():
    cadence = StepCadence(None)
    train(cadence, plain=0.16, recorded=0.15, waited=0.05)  # plain steps were slower by chance
    assert cadence.rates == pytest.approx(StepRates(0.16, 0.21, 0.4))


def test_what_a_copy_in_memory_takes_is_measured_where_there_can_be_one():
    cadence = StepCadence(None, can_copy=True)
    kinds = train(cadence, held=0.03)
    assert cadence.rates is not None and cadence.rates.held_seconds == pytest.approx(0.03)
    assert cadence.rates[:3] == pytest.approx((0.1, 0.15, 0.4))
    assert kinds.count("held") == NUM_ROUNDS * HELD_STEPS / 2 and len(kinds) <= 150
    cadence.adopt(CadenceChoice(40, 0.2, 0.1, 3.0, cadence.rates, 6, 0.05))
    assert [step for step in range(20) if cadence.is_copy_due(step)] == [0, 6, 12, 18] and not cadence.records
    for can_copy, held in ((True, cadence.rates.held_seconds), (False, None)):
        later = StepCadence(None, can_copy)
        later.restore(cadence.to_json())
        assert later.rates is not None and later.rates.held_seconds == held and later.copies == 6


def test_copies_that_turn_out_to_be_impossible_are_not_waited_for():
    cadence = StepCadence(None, can_copy=True)
    while not cadence.is_copy_due(0):
        cadence.stepped(0.1, 0.0)
    cadence.leave_copies()
    assert not cadence.is_copy_due(0) and not cadence.records
    train(cadence)
    assert cadence.rates is not None and cadence.rates.held_seconds is None


def test_a_step_with_an_evaluation_in_it_does_not_count():
    cadence = StepCadence(None)
    train(cadence, odd=(WARM_STEPS + 6, WARM_STEPS + BLOCK_STEPS + 7, WARM_STEPS + 2 * BLOCK_STEPS + 3))
    assert cadence.rates == pytest.approx(StepRates(0.1, 0.15, 0.4))


def test_a_step_that_waits_for_the_disk_counts():
    cadence = StepCadence(None)
    for number in range(1000):
        waits = 0.8 if cadence.records and number % 4 == 0 else 0.0
        due = not cadence.records and cadence.is_due(number, -1, exactly=False)
        if cadence.stepped(0.1 + waits, waits, due):
            break
    assert cadence.rates is not None and cadence.rates.recorded_seconds == pytest.approx(0.3)


def test_a_base_that_comes_late_is_waited_for():
    """The one before is still being written."""
    cadence = StepCadence(None)
    while cadence.records or not cadence.is_due(0, -1, exactly=False):
        cadence.stepped(0.1, 0.0)
    for _ in range(5):
        assert not cadence.stepped(9.0, 0.0) and cadence.is_due(0, -1, exactly=False)
    cadence.stepped(0.3, 0.05, copied=True)
    assert not cadence.is_due(0, -1, exactly=False)


def test_a_choice_is_kept_for_a_while_and_then_measured_in_one_round():
    cadence = StepCadence(None)
    train(cadence)
    assert cadence.rates is not None
    cadence.adopt(CadenceChoice(40, 0.2, 0.1, 20.0, cadence.rates))
    for step in range(max(LEAST_STEPS, 18_000)):
        assert not cadence.records and not cadence.is_measuring, step
        cadence.stepped(0.1, 0.0)
    assert cadence.records and cadence.is_measuring
    assert len(train(cadence)) == 2 * BLOCK_STEPS + COPIED_STEPS
    cadence.adopt(CadenceChoice(1, 0.2, 0.1, 20.0, cadence.rates))
    assert cadence.records and not cadence.is_measuring


def test_what_was_measured_is_known_to_a_later_process():
    cadence = StepCadence(None)
    train(cadence)
    assert cadence.rates is not None
    cadence.adopt(CadenceChoice(40, 0.2, 0.1, 20.0, cadence.rates))
    later = StepCadence(None)
    later.restore(cadence.to_json())
    assert (later.rates, later.every, later.is_measuring) == (cadence.rates, 40, False)


def test_a_process_that_is_killed_while_it_measures_goes_on_with_the_rounds_that_are_missing():
    cadence = StepCadence(None)
    for step in range(WARM_STEPS + 2 * BLOCK_STEPS + COPIED_STEPS + 5):
        due = not cadence.records and cadence.is_due(step, -1, exactly=False)
        cadence.stepped(0.1, 0.0, due)
    later = StepCadence(None)
    later.restore(cadence.to_json())
    assert len(train(later)) == WARM_STEPS + (NUM_ROUNDS - 1) * (2 * BLOCK_STEPS + COPIED_STEPS)


def test_two_that_adopt_the_same_do_the_same_at_every_step_whatever_their_clocks_say():
    one, two = StepCadence(None), StepCadence(None)
    for step in range(40_000):
        due = [not each.records and each.is_due(step, 0, exactly=True) for each in (one, two)]
        assert due[0] == due[1] and one.records == two.records
        ends = [one.stepped(0.1, 0.0, due[0]), two.stepped(7.0, 3.0, due[1])]
        assert ends[0] == ends[1]
        if ends[0]:
            assert one.rates is not None
            choice = CadenceChoice(5 if one.every == 1 else 1, 0.2, 0.1, 2.0, one.rates)
            one.adopt(choice)
            two.adopt(choice)
    assert len(one._rounds) == NUM_ROUNDS and step > 2 * 18_000


def test_bases_alone_are_due_at_multiples_and_made_up_for_where_one_was_missed():
    cadence = StepCadence(5)
    assert not cadence.records
    assert [step for step in range(1, 21) if cadence.is_due(step, 0, exactly=True)] == [5, 10, 15, 20]
    assert cadence.is_due(12, 7, exactly=False) and not cadence.is_due(12, 10, exactly=False)
    assert not cadence.stepped(0.1, 0.0)


def test_records_of_every_step_are_what_is_told():
    cadence = StepCadence(1)
    assert cadence.records and not cadence.is_measuring
