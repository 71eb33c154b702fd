"""Guesses: updates that do not wait for the norm, and what does them again where it is not what they took it for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from holdfast.schedule.operations import GUESS, UPDATE, Key, as_guessed, lane_bytes
from holdfast.schedule.planner.machine_rates import Machine
from holdfast.schedule.simulate import simulate
from holdfast.schedule.vertical import forward_only, vertical
from holdfast.schedule.work import BlockPlacement, StepShape
from plan_steps import Order, equal_blocks, keys, steps, uneven

END = Key("norm")


def guessing(step):
    work, placement, shape = step
    return work, placement, replace(shape, clipping="speculate", commit=True)


def guessed_keys(made, *kinds):
    return [key for key in keys(made, *kinds) if key.phase == GUESS]


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_a_guess_waits_for_no_other_blocks_gradients_and_what_redoes_it_for_all(step):
    made = vertical(*guessing(step))
    order = Order(made)
    for guess in guessed_keys(made, "update"):
        again = Key("update", guess.block, tile=guess.tile)
        assert not order.before((0, END), (0, guess))
        assert not any(order.before((0, Key("backward", b, 0)), (0, guess)) for b in range(guess.block))
        assert order.before((0, END), (0, Key("load_state", guess.block, tile=guess.tile)))
        assert order.before((0, END), (0, again)) and order.before((0, guess), (0, again))


@pytest.mark.slow
@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_what_is_written_again_is_written_after_what_was_guessed_and_read_after_that(step):
    work, placement, shape = guessing(step)
    made = vertical(work, placement, shape)
    evaluation = forward_only(work, placement, shape)
    following, evaluated = Order(made, made), Order(made, evaluation)
    for guess in guessed_keys(made, "store_params", "store_state"):
        again = Key(guess.kind, guess.block, tile=guess.tile)
        assert following.before((0, guess), (0, again))
    for again in {guess.block for guess in guessed_keys(made, "update")}:
        for phase in ("forward", "backward"):
            for read in keys(made, "upload_params"):
                if read.block == again and read.phase == phase:
                    assert following.before((0, Key("update", again)), (1, read))
        upload = Key("upload_params", again, -1, "evaluate")
        assert evaluated.before((0, Key("update", again)), (1, upload))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_gradients_outlive_the_guess_until_it_is_known_to_be_right(step):
    made = vertical(*guessing(step))
    for op in made:
        if op.key.kind == "update" and op.key.phase == GUESS:
            assert not any(name[0] in ("grads", "kept_grads", "kept_inputs") for name in op.gives)


def test_what_is_done_again_is_done_in_the_order_in_which_the_next_step_wants_it():
    shape = StepShape(micro_batches=2, clipping="speculate", delayed_fraction=0.5)
    made = vertical(uneven(4), BlockPlacement.fractions(4), shape)
    assert [key.block for key in guessed_keys(made, "update")] == [2, 0]
    after = made[next(i for i, op in enumerate(made) if op.key == END) :]
    assert [op.key.block for op in after if op.key.kind == "update"] == [0, 1, 2, 3]
    assert [op.redo for op in after if op.key.kind == "update"] == [True, False, True, False]


def test_delaying_everything_leaves_nothing_to_guess():
    shape = StepShape(micro_batches=2, clipping="speculate", delayed_fraction=1.0)
    work, placement = uneven(4), BlockPlacement.fractions(4)
    assert vertical(work, placement, shape) == vertical(work, placement, replace(shape, clipping="defer"))


def machine(compute_flop_per_second, **rates):
    return Machine(
        ssd_read_bytes_per_second=1e9,
        ssd_write_bytes_per_second=1e9,
        upload_bytes_per_second=1e10,
        download_bytes_per_second=1e10,
        compute_flop_per_second=compute_flop_per_second,
        update_elements_per_second=1e9,
        shared_ssd=True,
        **rates,
    )


@pytest.mark.parametrize("computing", [0.5, 1.0, 2.0])
def test_a_right_guess_costs_little_and_a_wrong_one_what_it_moves(computing):
    """Of equal blocks whose gradients stay in memory; ``computing`` is its time over the SSD's."""
    n, m, params, tokens = 12, 8, 1_000_000, 2000
    work, placement = equal_blocks(n, params, tokens, unified=False), BlockPlacement.fractions(n)
    ssd_seconds = 30 * params * n / 1e9
    slow = machine(8 * params * n * m * tokens / (ssd_seconds * computing))
    made = {
        clipping: vertical(work, placement, StepShape(micro_batches=m, clipping=clipping))
        for clipping in ("none", "defer", "speculate", "per_block")
    }
    right = as_guessed(made["speculate"])
    seconds = {name: simulate([ops] * 6, slow).seconds_per_step for name, ops in made.items()}
    held = simulate([right] * 6, slow).seconds_per_step
    assert seconds["per_block"] == pytest.approx(seconds["none"], rel=1e-6)
    assert held < 1.06 * seconds["none"] and held < seconds["defer"] * 1.001
    more = sum(lane_bytes(made["speculate"]).values()) - sum(lane_bytes(right).values())
    assert more == n * (2 * 12 + 2) * params
    assert held < seconds["speculate"] < held + more / 1e9
    assert sum(op.work for op in made["speculate"] if op.lane == UPDATE) == 2 * n * params
