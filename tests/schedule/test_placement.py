"""BlockPlacement by budget: what was asked for is given, and the rest fills the budget in order."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInput, DoesNotFit
from holdfast.quantities import MiB, ample_budget, parse_bytes
from holdfast.schedule.horizontal import horizontal
from holdfast.schedule.memory_use import predict
from holdfast.schedule.planner.placement import choose
from holdfast.schedule.work import CLIPPING, BlockPlacement, MemorySaving, StepShape
from plan_steps import uneven

WORK = uneven(8)
SHAPE = StepShape(micro_batches=3, clipping="defer")


def needs(placement: BlockPlacement, shape: StepShape = SHAPE) -> int:
    return predict(WORK, placement, shape).host_bytes


def least_of(placement: BlockPlacement) -> BlockPlacement:
    """With all that is slower and takes less memory."""
    return replace(placement, saving=MemorySaving(1, resident_state=False, loads_ahead=False))


def on_ssd(**fractions: float) -> BlockPlacement:
    return BlockPlacement.fractions(8, **{"activations": 0.0, "gradients": 0.0, **fractions})


def test_without_a_budget_everything_stays():
    everything = BlockPlacement.fractions(8, params=1.0, optimizer=1.0, activations=1.0, gradients=1.0)
    assert choose(WORK, SHAPE, None) == everything


def test_gradients_wait_in_memory_as_far_as_they_may():
    total = sum(block.kept_grad_bytes for block in WORK.blocks)
    halves = [choose(WORK, SHAPE, None, waiting_bytes=part * total).shares for part in (0.0, 0.5, 0.6)]
    assert [each["gradients"] for each in halves] == [0.0, 0.5, 0.5]
    assert all(each["params"] == each["optimizer"] == each["activations"] == 1.0 for each in halves)


def test_the_least_budget_keeps_nothing_and_one_byte_less_does_not_fit():
    least = needs(least_of(on_ssd()))
    assert choose(WORK, SHAPE, least) == least_of(on_ssd())
    with pytest.raises(DoesNotFit, match=f'Give it "{ample_budget(least)}"'):
        choose(WORK, SHAPE, least - 1)


def test_what_is_asked_for_is_given_or_refused_with_a_budget_that_works():
    asked = least_of(on_ssd(optimizer=0.75))
    assert choose(WORK, SHAPE, needs(asked), optimizer=0.75) == asked
    with pytest.raises(DoesNotFit) as refused:
        choose(WORK, SHAPE, needs(asked) - 1, optimizer=0.75)
    text = str(refused.value)
    assert "optimizer_on_host=0.75" in text
    works, least = (parse_bytes(figure) for figure in re.findall(r'"(\d+MiB)"', text))
    assert choose(WORK, SHAPE, works, optimizer=0.75).optimizer == asked.optimizer
    with pytest.raises(DoesNotFit):
        choose(WORK, SHAPE, least, optimizer=0.75)
    assert choose(WORK, SHAPE, least)
    assert "(holdfast train: --set offload.host_budget=1MiB --set offload.optimizer_on_host=auto)" in text


def test_the_budget_is_filled_in_order():
    """Parameters, then gradients, then block inputs, then the optimizer's state."""
    filled = {}
    for kind in ("params", "gradients", "activations", "optimizer"):
        filled[kind] = 1.0
        assert choose(WORK, SHAPE, needs(on_ssd(**filled))) == on_ssd(**filled)


def test_a_part_is_kept_where_not_all_fits():
    chosen = choose(WORK, SHAPE, needs(on_ssd(params=1.0, gradients=1.0, activations=1.0, optimizer=0.375)))
    assert sum(chosen.optimizer) == 3 and all(chosen.params + chosen.gradients + chosen.activations)


def test_other_orders_have_their_own_needs():
    """The horizontal order keeps gradients without clipping too. It has one micro-batch between blocks, whose
    inputs take less than the buffers that would move them."""
    shape = StepShape(micro_batches=3)
    least = predict(WORK, on_ssd(activations=1.0), shape, horizontal).host_bytes
    assert least < predict(WORK, on_ssd(), shape, horizontal).host_bytes
    assert choose(WORK, shape, least, schedule=horizontal) == on_ssd(activations=1.0)
    upright = choose(WORK, shape, predict(WORK, on_ssd(), shape).host_bytes)
    assert all(upright.gradients)  # in the vertical order none wait, so it takes nothing to keep all


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "some"])
def test_a_fraction_that_is_none_is_refused(wrong):
    with pytest.raises(BadInput, match="params_on_host"):
        choose(WORK, SHAPE, None, params=wrong)


@given(
    budget=st.integers(400_000, 3_000_000),
    asked=st.fixed_dictionaries(
        {kind: st.sampled_from(["auto", 0.0, 0.25, 1.0]) for kind in ("params", "activations", "optimizer")}
    ),
    count=st.integers(1, 6),
    clipping=st.sampled_from(CLIPPING),
)
@settings(max_examples=80, deadline=None)
def test_whatever_is_chosen_fits_and_keeps_what_was_asked(budget, asked, count, clipping):
    work, shape = uneven(count), StepShape(micro_batches=2, clipping=clipping)
    try:
        chosen = choose(work, shape, budget, **asked)
    except DoesNotFit as error:
        works = parse_bytes(re.findall(r"Give it \"(\d+MiB)\"", str(error))[0])
        assert works > budget
        choose(work, shape, works, **asked)
        return
    assert predict(work, chosen, shape).host_bytes <= budget
    for kind, fraction in asked.items():
        if isinstance(fraction, float):
            alone = BlockPlacement.fractions(count, **{kind: fraction})
            assert getattr(chosen, kind) == getattr(alone, kind)


THERE = replace(WORK, unified=False, input_bytes=32 * MiB)


def test_a_shorter_step_takes_no_more_of_a_device_than_the_announced():
    """Inputs of 16 micro-batches would stay, those of 17 do not."""
    placement = choose(THERE, StepShape(micro_batches=17), None)
    announced = predict(THERE, placement, StepShape(micro_batches=17)).device_bytes
    assert all(
        predict(THERE, placement, StepShape(micro_batches=m)).device_bytes <= announced for m in range(1, 17)
    )


def test_inputs_move_where_a_device_has_no_room_for_them():
    stays = choose(THERE, StepShape(micro_batches=8), None)
    moves = replace(stays, saving=replace(stays.saving, inputs_stay=False))
    most, least = (predict(THERE, each, StepShape(micro_batches=8)).device_bytes for each in (stays, moves))
    assert least < most
    assert choose(THERE, StepShape(micro_batches=8), None, device_budget_bytes=most) == stays
    assert choose(THERE, StepShape(micro_batches=8), None, device_budget_bytes=most - 1) == moves
