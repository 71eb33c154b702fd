"""The number of micro-batches: the fewest that keep the machine busy, within the budget."""

from dataclasses import replace

import pytest

from holdfast.cli.train.micro_batch_choice import GAIN, MARGIN_BYTES, fewest_micro_batches
from holdfast.errors import DoesNotFit
from holdfast.profiles import load_machine
from holdfast.schedule.planner.placement_search import Question, answer
from holdfast.schedule.vertical import vertical
from holdfast.schedule.work import StepShape
from plan_steps import equal_blocks

WORK = replace(
    equal_blocks(4, 10**6, tokens=2500, input_bytes=10**5),
    resident_state_bytes=10**6,
    resident_param_bytes=10**5,
    resident_elements=10**5,
)


def on_the_ssd(rate, budget=None, **work) -> Question:
    """All state is on an SSD of ``rate`` bytes a second, and all inputs in memory."""
    return Question(
        work=replace(WORK, **work),
        shape=StepShape(micro_batches=4),
        machine=replace(
            load_machine("cpu-2-core"), ssd_read_bytes_per_second=rate, ssd_write_bytes_per_second=rate
        ),
        schedule=vertical,
        host_budget=budget,
        held_bytes=10**6,
        evaluation_batches=1,
        asked={"params": 0.0, "optimizer": 0.0, "activations": 1.0},
        delayed_fraction=0.0,
    )


def step_seconds(question, count):
    return answer(replace(question, shape=replace(question.shape, micro_batches=count))).best.step_seconds


def test_micro_batches_double_until_computing_binds():
    """The last doubling but one gains a sixth here, which is worth it."""
    question = on_the_ssd(7 * 10**7)
    found = fewest_micro_batches(question)
    count = 1
    while 2 * step_seconds(question, count) / step_seconds(question, 2 * count) >= 1 + GAIN:
        count *= 2
    assert (found.count, found.limited_by) == (count, "gain")
    assert 1 < count < 64
    assert list(found.step_seconds) == [2**k for k in range(count.bit_length() + 1)]
    chosen = answer(replace(question, shape=replace(question.shape, micro_batches=count))).best.simulation
    assert chosen.busiest()[0] == "cores" and chosen.speed_of_light > 0.8
    assert fewest_micro_batches(on_the_ssd(10**9)).count < count


def test_commits_that_are_rare_need_fewer():
    """Only a commit writes what stays in memory."""
    question = replace(on_the_ssd(10**8), asked={"params": 1.0, "optimizer": 1.0, "activations": 1.0})
    assert fewest_micro_batches(question, commits=False).count < fewest_micro_batches(question).count


def test_the_budget_limits_the_count():
    big = {"input_bytes": 10**8}
    found = fewest_micro_batches(on_the_ssd(10**8, budget=2 * 10**9, **big))
    assert (found.count, found.limited_by, list(found.step_seconds)) == (2, "memory", [1, 2])
    with pytest.raises(DoesNotFit):
        step_seconds(on_the_ssd(10**8, budget=2 * 10**9 - MARGIN_BYTES, **big), 2 * found.count)
    with pytest.raises(DoesNotFit, match="its budget is"):
        fewest_micro_batches(on_the_ssd(10**8, budget=10**7))


def test_no_more_are_tried_than_asked():
    found = fewest_micro_batches(on_the_ssd(10**7), most=7)
    assert (found.count, found.limited_by) == (4, "most")
