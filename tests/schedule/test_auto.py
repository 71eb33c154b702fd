"""A choice by the list: nothing that was tried is faster, everything fits, and what was stated is as stated."""

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest

from holdfast.errors import BadInput, DoesNotFit
from holdfast.profiles import load_machine
from holdfast.schedule.horizontal import horizontal
from holdfast.schedule.memory_use import predict
from holdfast.schedule.planner import placement_search
from holdfast.schedule.planner.placement_search import MeasuredModel, Question, answer, play
from holdfast.schedule.vertical import vertical
from holdfast.schedule.work import BlockPlacement, StepShape
from plan_steps import equal_blocks

WORK = replace(
    equal_blocks(8, 10**6, tokens=2500, input_bytes=10**5),
    resident_state_bytes=10**6,
    resident_param_bytes=10**5,
    resident_elements=10**5,
    head_flop=1e9,
)
BLOCK = WORK.blocks[0]
MACHINE = replace(
    load_machine("cpu-2-core"), ssd_read_bytes_per_second=10**8, ssd_write_bytes_per_second=10**8
)
AUTO = {"params": "auto", "optimizer": "auto", "activations": "auto"}


def asked(budget=None, schedule=vertical, delayed="auto", work=WORK, **fractions) -> Question:
    return Question(
        work=work,
        shape=StepShape(micro_batches=4),
        machine=MACHINE,
        schedule=schedule,
        host_budget=budget,
        held_bytes=10**6,
        evaluation_batches=4,
        asked=AUTO | fractions,
        delayed_fraction=delayed,
    )


def host_bytes(question, choice) -> int:
    memory = predict(
        question.work, choice.placement, choice.shape, question.schedule, question.evaluation_batches
    )
    return question.held_bytes + memory.host_bytes


BUDGETS = [60 * 10**6, 80 * 10**6, 110 * 10**6, None]


@cache
def within(budget):
    """The answer where nothing else is asked."""
    return answer(asked(budget))


@pytest.mark.slow
def test_no_placement_of_a_grid_that_fits_is_much_faster():
    question, found = asked(), {budget: within(budget).best for budget in BUDGETS}
    for budget, best in found.items():
        assert budget is None or host_bytes(question, best) <= budget
    for params, optimizer, delayed in product((0, 0.25, 0.5, 1), (0, 0.25, 0.5, 1), (0, 0.25, 0.5, 1)):
        placement = BlockPlacement.fractions(8, params=params, optimizer=optimizer)
        other = play(question, placement, replace(question.shape, delayed_fraction=delayed))
        needed = host_bytes(question, other)
        for budget, best in found.items():
            if budget is None or needed <= budget:
                assert best.step_seconds <= 1.02 * other.step_seconds, (budget, params, optimizer, delayed)


@pytest.mark.slow
def test_more_memory_is_never_slower():
    seconds = [within(budget).best.step_seconds for budget in BUDGETS]
    assert all(after <= 1.01 * before for before, after in pairwise(seconds))
    assert seconds[-1] < 0.8 * seconds[0]


def test_what_is_stated_is_taken():
    found = answer(asked(params=0.5, optimizer=0.0, activations=1.0, delayed=0.25))
    assert found.tried == 1
    assert found.best.fractions | {"gradients": 1} == {
        "params": 0.5,
        "optimizer": 0.0,
        "activations": 1.0,
        "gradients": 1,
    }
    assert found.best.shape.delayed_fraction == 0.25
    partly = answer(asked(110 * 10**6, optimizer=0.25)).best
    assert partly.fractions["optimizer"] == 0.25


def test_what_is_stated_and_does_not_fit_is_refused():
    with pytest.raises(DoesNotFit, match=r"optimizer_on_host=1\.0"):
        answer(asked(60 * 10**6, optimizer=1.0))
    with pytest.raises(BadInput, match=r"params_on_host = 1\.5"):
        answer(asked(params=1.5))


@pytest.mark.slow
def test_delay_is_chosen_where_it_helps():
    """State on the SSD, parameters in memory, as long for the SSD as for the cores: without delay the forward pass
    moves little."""
    many = replace(WORK, blocks=(BLOCK,) * 24)
    rate = 140 * 10**6
    machine = replace(MACHINE, ssd_read_bytes_per_second=rate, ssd_write_bytes_per_second=rate)
    question = replace(asked(params=1.0, optimizer=0.0, activations=1.0, work=many), machine=machine)
    found = answer(question).best
    assert found.shape.delayed_fraction > 0
    assert found.step_seconds < 0.92 * play(question, found.placement, question.shape).step_seconds
    clipped = answer(replace(question, shape=replace(question.shape, clipping="defer"))).best
    assert clipped.shape.delayed_fraction == 0
    assert answer(asked(schedule=horizontal)).best.shape.delayed_fraction == 0


KEEPING = replace(WORK, blocks=(replace(BLOCK, activation_bytes=2 * 10**6),) * 8)
"""What four micro-batches leave of a block takes 8 MB, and 2 MB of parameters stay with it."""


def keeping(budget, flop=5e9, **fields) -> Question:
    blocks = tuple(replace(block, forward_flop=flop) for block in KEEPING.blocks)
    question = asked(budget, work=replace(KEEPING, blocks=blocks))
    return replace(question, **{"recomputed_fraction": "auto", **fields})


@pytest.mark.slow
def test_nothing_is_computed_again_where_computing_binds_and_there_is_memory():
    ample = keeping(10**9, flop=5e10)
    found = answer(ample).best
    assert found.shape.recomputed_fraction == 0
    again = answer(replace(ample, recomputed_fraction=1.0)).best
    assert found.step_seconds < 0.8 * again.step_seconds  # of 29 units of computing 7 are gone
    little = keeping(100 * 10**6, flop=5e10)
    found = answer(little).best
    assert 0 < found.shape.recomputed_fraction < 1
    assert host_bytes(little, found) <= 100 * 10**6
    assert found.step_seconds < answer(replace(little, recomputed_fraction=1.0)).best.step_seconds


@pytest.mark.slow
def test_all_is_computed_again_where_the_ssd_binds_or_no_memory_is_said():
    slow = replace(MACHINE, ssd_read_bytes_per_second=10**6, ssd_write_bytes_per_second=10**6)
    assert answer(keeping(10**8, flop=5e7, machine=slow)).best.shape.recomputed_fraction == 1
    assert answer(keeping(None, flop=5e10)).best.shape.recomputed_fraction == 1
    apart = replace(KEEPING, unified=False)
    assert answer(keeping(10**9, work=apart)).best.shape.recomputed_fraction == 1


def test_what_stays_on_a_separate_device_fits_there():
    apart = keeping(10**9, device_budget=50 * 10**6)
    apart = replace(apart, work=replace(apart.work, unified=False))
    found = answer(apart).best
    assert 0 < found.shape.recomputed_fraction < 1
    memory = predict(apart.work, found.placement, found.shape, apart.schedule, apart.evaluation_batches)
    assert memory.device_bytes <= 50 * 10**6


@pytest.mark.slow
def test_without_highs_it_is_by_what_saves_most(monkeypatch):
    def absent():
        raise BadInput("not there")

    with_highs = within(80 * 10**6)
    monkeypatch.setattr(placement_search, "load_highs", absent)
    monkeypatch.setattr(placement_search, "solve", None)
    found = answer(asked(80 * 10**6))
    assert (with_highs.by_linear_program, found.by_linear_program) == (True, False)
    assert host_bytes(asked(80 * 10**6), found.best) <= 80 * 10**6
    assert found.best.step_seconds <= 1.05 * with_highs.best.step_seconds


def test_a_search_plays_no_more_than_it_may():
    assert answer(asked(80 * 10**6), most_played=5000).tried <= 4


def test_the_linear_program_is_told_frozen_parameters_and_small_states():
    """Half of each block is frozen, and of the other half the optimizer keeps nothing but masters."""
    block = replace(
        BLOCK, elements=5 * 10**5, trained_param_bytes=10**6, state_bytes=2 * 10**6, grad_bytes=2 * 10**6
    )
    model = MeasuredModel(replace(WORK, blocks=(block,) * 8))
    assert (model.param_bytes_each, model.state_bytes_each) == (2, 4.0)
    assert (model.frozen_block_bytes, model.trained_block_parameters) == (10**6, 5 * 10**5)
    assert model.input_elements == 5 * 10**4
    frozen = replace(block, elements=0, trained_param_bytes=0, state_bytes=0, grad_bytes=0)
    nothing = asked(70 * 10**6, work=replace(WORK, blocks=(frozen,) * 8))
    assert answer(nothing).best.fractions["params"] == 1
