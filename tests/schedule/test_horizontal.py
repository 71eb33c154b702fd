"""The horizontal order: what goes only for it."""

import pytest
from hypothesis import given, settings

from holdfast.schedule import operations
from holdfast.schedule.horizontal import horizontal
from holdfast.schedule.operations import TIED, Key
from holdfast.schedule.work import BlockPlacement, StepShape
from plan_steps import Order, equal_blocks, grid, keys, steps


def test_equal_blocks_move_the_sums_of_the_papers():
    n, m, p, s = 10, 7, 1000, 4096
    work = equal_blocks(n, p, tokens=1, input_bytes=s)
    made = horizontal(work, BlockPlacement.fractions(n), StepShape(micro_batches=m))
    lanes = operations.lane_bytes(made)
    d, g, state = 2, 4, 12
    crossing = m * (2 * n - 1) * d * p + (2 * m - 1) * n * g * p + 2 * m * (n - 1) * s
    assert lanes["upload"] + lanes["download"] == crossing
    assert lanes["ssd_read"] == m * (2 * n - 1) * d * p + n * state * p
    assert lanes["ssd_write"] == n * d * p + n * state * p


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_sums_grow_in_the_order_of_the_micro_batches(step):
    made = horizontal(*step)
    order = Order(made)
    last = len(step[0].blocks) - 1
    for upload in keys(made, "upload_grads"):
        block, m = upload.block, upload.micro_batch
        if upload.phase == TIED:
            parked = (0, Key("download_grads", block, m, TIED))
            assert order.before((0, Key("backward", last, m)), parked) and order.before(parked, (0, upload))
            assert order.before((0, upload), (0, Key("backward", block, m)))
            continue
        first = last if block == step[0].tied_block else block
        assert order.before((0, upload), (0, Key("backward", first, m)))
        assert order.before((0, Key("backward", block, m - 1)), (0, Key("download_grads", block, m - 1)))
        assert order.before((0, Key("download_grads", block, m - 1)), (0, upload))
        assert order.before((0, upload), (0, Key("backward", block, m)))


@pytest.mark.slow
def test_a_spilled_sum_is_read_after_it_was_written_and_written_after_it_was_read():
    shape = StepShape(micro_batches=3, clipping="defer")
    for work, _, _ in grid((3,)):
        made = horizontal(work, BlockPlacement.fractions(3, gradients=0.0), shape)
        order = Order(made)
        for block in range(3):
            for m in range(3):
                store, load = (0, Key("store_grads", block, m)), (0, Key("load_grads", block, m))
                assert order.before(store, load)
                if m < 2:
                    assert order.before(load, (0, Key("store_grads", block, m + 1)))
