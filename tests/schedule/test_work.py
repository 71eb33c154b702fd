"""Which blocks stay in host memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.schedule.work import BlockPlacement, spread


@given(count=st.integers(0, 200), fraction=st.floats(0, 1))
def test_a_fraction_is_as_near_as_whole_blocks_allow_and_even(count, fraction):
    chosen = spread(count, fraction)
    assert len(chosen) == count
    assert abs(sum(chosen) - fraction * count) <= 0.5
    for start in range(count):  # no stretch has more than its share, give or take one
        for stop in (start + 1, start + 5, count):
            part = chosen[start:stop]
            assert abs(sum(part) - len(part) * sum(chosen) / count) < 1


def test_block_zero_is_the_first_whose_parameters_and_state_stay():
    placement = BlockPlacement.fractions(4, params=0.25, optimizer=0.25, gradients=0.25)
    assert placement.params == placement.optimizer == placement.gradients == (True, False, False, False)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_the_inputs_of_the_last_block_never_leave_and_do_not_count(fraction):
    stay = BlockPlacement.fractions(5, activations=fraction).activations
    assert stay[-1] and sum(stay[:-1]) == fraction * 4


def test_a_model_of_one_block_has_a_placement():
    assert BlockPlacement.fractions(1, params=1.0, activations=0.0).params == (True,)
