"""The zeroth-order step: one read and one write of each block, two streams of forward passes, and nothing else."""

import pytest
from hypothesis import given, settings

from holdfast.schedule import operations
from holdfast.schedule.memory_use import buffers, predict
from holdfast.schedule.mezo_schedule import DISPLACED, MEASURED, catch_up, zeroth
from holdfast.schedule.operations import SSD_READ, Key, lane_bytes
from holdfast.schedule.planner.placement import STATE_FIRST, choose
from holdfast.schedule.work import BlockPlacement, StepShape
from plan_steps import Order, equal_blocks, grid, keys, steps, uneven
from support.schedules import check_schedule


def on_ssd(work, stays, size):
    return sum(getattr(block, size) for block, here in zip(work.blocks, stays) if not here)


@pytest.mark.slow
def test_a_step_moves_each_block_once_each_way_whatever_the_number_of_micro_batches():
    for work, placement, shape in grid():
        made = zeroth(work, placement, shape)
        check_schedule(made)
        n, streams, s = len(work.blocks), 2 * shape.micro_batches, work.input_bytes
        state = on_ssd(work, placement.optimizer, "state_bytes")
        everything = sum(block.state_bytes for block in work.blocks)
        trained = sum(block.trained_param_bytes for block in work.blocks)
        expected = {
            ("ssd_read", "load_state"): state,
            ("ssd_write", "store_state"): everything if shape.commit else state,
            ("ssd_read", "load_frozen"): on_ssd(work, placement.params, "param_bytes")
            - on_ssd(work, placement.params, "trained_param_bytes"),
            ("ssd_write", "store_resident"): work.resident_state_bytes if shape.commit else 0,
            ("upload", "upload_params"): sum(block.param_bytes for block in work.blocks) + trained,
            ("upload", "upload_displaced_resident"): 0
            if work.unified
            else 2 * work.resident_trained_param_bytes,
            ("download", "download_input"): (n - 1) * streams * s,
            ("upload", "upload_input"): (n - 1) * streams * s,
        }
        assert operations.traffic(made) == {key: nbytes for key, nbytes in expected.items() if nbytes}


def test_on_the_ssd_a_step_takes_four_bytes_of_each_parameter_each_way():
    """An ordinary step with Adam reads 16 and writes 14."""
    n, params = 10, 1000
    work = equal_blocks(n, params, tokens=1)
    blocks = tuple(block.__class__(**{**vars(block), "state_bytes": 4 * params}) for block in work.blocks)
    work = work.__class__(**{**vars(work), "blocks": blocks})
    lanes = operations.lane_bytes(zeroth(work, BlockPlacement.fractions(n), StepShape(micro_batches=7)))
    assert lanes["ssd_read"] == lanes["ssd_write"] == n * 4 * params
    assert lanes["download"] == lanes["upload"] - n * 2 * 2 * params  # what flows between blocks


def test_catching_up_writes_all_state_and_what_evaluations_read():
    for work, placement, shape in grid():
        made = catch_up(work, placement, shape.commit)
        check_schedule(made)
        state = on_ssd(work, placement.optimizer, "state_bytes")
        expected = {
            ("ssd_read", "load_state"): state,
            ("ssd_write", "store_state"): sum(b.state_bytes for b in work.blocks) if shape.commit else state,
            ("ssd_write", "store_params"): on_ssd(work, placement.params, "trained_param_bytes"),
            ("ssd_write", "store_resident"): work.resident_state_bytes if shape.commit else 0,
            ("upload", "upload_resident"): 0 if work.unified else work.resident_param_bytes,
        }
        assert operations.traffic(made) == {key: nbytes for key, nbytes in expected.items() if nbytes}
        assert any(op.key == Key("commit") for op in made) == shape.commit


@pytest.mark.slow
def test_catching_up_takes_no_more_memory_than_a_step():
    for work, placement, shape in grid():
        step, after = buffers(zeroth(work, placement, shape)), buffers(catch_up(work, placement, True))
        for place in ("host", "device"):
            most = {
                name: sum(size for (where, _), size in made.items() if where == place)
                for name, made in (("step", step), ("after", after))
            }
            assert most["after"] <= most["step"]


# Order. Every claim holds for lanes of any speed: it is looked up in the dependencies.


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_a_block_moves_after_the_losses_of_the_step_before_and_is_written_after_its_commit(step):
    made = zeroth(*step)
    order = Order(made, made)
    for moved in keys(made, "displace", "displace_resident"):
        assert order.before((0, MEASURED), (1, moved))
    for stored in keys(made, "store_state", "store_resident"):
        assert order.before((0, MEASURED), (1, stored))
        assert not step[2].commit or order.before((0, Key("commit")), (1, stored))
    for block in range(len(step[0].blocks)):
        for m in range(2 * step[2].micro_batches):
            assert order.before((0, Key("displace", block)), (0, Key(DISPLACED, block, m)))
            assert order.before((0, Key("displace_resident")), (0, Key(DISPLACED, block, m)))
            assert order.before((0, Key(DISPLACED, block, m)), (0, MEASURED))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_what_is_moved_was_written_before_and_what_is_committed_is_of_this_step(step):
    """An image in host memory may not change under the writing of the step before."""
    made = zeroth(*step)
    order = Order(made, made)
    for stored in keys(made, "store_state"):
        assert order.before((0, Key("displace", stored.block)), (0, stored))
        assert order.before((0, stored), (1, Key("displace", stored.block)))
        assert not step[2].commit or order.before((0, stored), (0, Key("commit")))
    if step[2].commit:
        assert order.before((0, MEASURED), (0, Key("store_resident")))
        assert order.before((0, Key("store_resident")), (0, Key("commit")))
        assert order.before((0, Key("store_resident")), (1, Key("displace_resident")))
        assert order.before((0, Key("store_resident")), (1, MEASURED))
        assert order.before((0, Key("commit")), (1, MEASURED))


@given(step=steps())
@settings(max_examples=30, deadline=None)
def test_streams_go_one_after_the_other_and_what_is_between_blocks_is_kept_for_both(step):
    made = zeroth(*step)
    found = keys(made, DISPLACED)
    expected = [
        Key(DISPLACED, block, m)
        for block in range(len(step[0].blocks))
        for m in range(2 * step[2].micro_batches)
    ]
    assert found == expected


def test_what_fits_is_the_state_first_which_alone_a_step_moves():
    """Between the least memory and the most: no other placement of that memory reads less."""
    work, shape = uneven(8), StepShape(micro_batches=2)
    least, most = (
        predict(work, BlockPlacement.fractions(8, params=kept, optimizer=kept), shape, zeroth, 0).host_bytes
        for kept in (0, 1)
    )
    for part in (0.25, 0.5, 0.75):
        budget = round(least + part * (most - least))
        found = choose(work, shape, budget, schedule=zeroth, order=STATE_FIRST)
        assert predict(work, found, shape, zeroth, 0).host_bytes <= budget
        assert 0 < sum(found.optimizer) < 8 or all(found.optimizer)
        for params in range(9):
            for optimizer in range(9):
                other = BlockPlacement.fractions(8, params=params / 8, optimizer=optimizer / 8)
                if predict(work, other, shape, zeroth, 0).host_bytes <= budget:
                    assert read_bytes(work, found, shape) <= read_bytes(work, other, shape)


def read_bytes(work, placement, shape):
    return lane_bytes(zeroth(work, placement, shape))[SSD_READ]
