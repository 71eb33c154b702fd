"""The vertical order: what goes only for it, and for the evaluations and saves that are made like it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from holdfast.schedule import operations
from holdfast.schedule.operations import Key
from holdfast.schedule.vertical import commit_only, forward_only, vertical
from holdfast.schedule.work import BlockPlacement, StepShape
from plan_steps import Order, equal_blocks, grid, keys, steps, uneven
from support.schedules import check_schedule


def test_equal_blocks_move_the_sums_of_the_papers():
    n, m, p, s = 10, 7, 1000, 4096
    shape = StepShape(micro_batches=m)
    made = vertical(
        equal_blocks(n, p, tokens=1, input_bytes=s), BlockPlacement.fractions(n, activations=0.0), shape
    )
    lanes = operations.lane_bytes(made)
    d, g, state = 2, 4, 12
    between_blocks = (
        5 * m * n * s - 4 * m * s
    )  # 5M per block; the last runs no forward, block 0 takes no input
    assert lanes["upload"] + lanes["download"] == (2 * n - 1) * d * p + n * g * p + between_blocks
    assert lanes["ssd_read"] == (2 * n - 1) * d * p + n * state * p + (n - 1) * m * s
    assert lanes["ssd_write"] == n * d * p + n * state * p + (n - 1) * m * s


@pytest.mark.slow
def test_an_evaluation_loads_each_block_once_and_changes_nothing():
    for work, placement, shape in grid():
        made = forward_only(work, placement, shape)
        check_schedule(made)
        n, m, s = len(work.blocks), shape.micro_batches, work.input_bytes
        on_ssd = sum(b.param_bytes for b, stays in zip(work.blocks, placement.params) if not stays)
        expected = {
            ("ssd_read", "load_params"): on_ssd,
            ("upload", "upload_params"): sum(b.param_bytes for b in work.blocks),
            ("download", "download_input"): (n - 1) * m * s,
            ("upload", "upload_input"): (n - 1) * m * s,
        }
        assert operations.traffic(made) == {key: nbytes for key, nbytes in expected.items() if nbytes}


def test_saving_writes_what_stays_in_memory_and_commits():
    for work, placement, _ in grid():
        made = commit_only(work, placement)
        check_schedule(made)
        stays = sum(b.state_bytes for b, here in zip(work.blocks, placement.optimizer) if here)
        assert operations.lane_bytes(made) == {"ssd_write": stays + work.resident_state_bytes}
        assert made[-1].key == Key("commit")


# Order. Every claim holds for lanes of any speed: it is looked up in the dependencies.


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_an_evaluation_computes_with_updated_parameters(step):
    work, placement, shape = step
    made = forward_only(work, placement, shape)
    trained = vertical(work, placement, shape)
    order = Order(trained, made)
    for computed in keys(made, "evaluate"):
        updates = [
            key for key in keys(trained, "update", "update_resident") if key.block in (-1, computed.block)
        ]
        assert len({key.kind for key in updates}) == 2
        assert all(order.before((0, key), (1, computed)) for key in updates)


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_a_save_commits_what_earlier_steps_wrote(step):
    work, placement, shape = step
    clipping = "defer" if shape.clipping == "speculate" else shape.clipping
    quiet = vertical(work, placement, replace(shape, clipping=clipping, commit=False))
    order = Order(quiet, commit_only(work, placement))
    for updated in keys(quiet, "update"):
        assert order.before((0, updated), (1, Key("commit")))
    for store in keys(quiet, "store_state", "store_resident"):
        assert order.before((0, store), (1, Key("commit")))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_micro_batches_go_up_and_in_a_snake_down_through_odd_blocks(step):
    made = vertical(*step)
    order = Order(made)
    for phase in ("forward", "backward"):
        for earlier, later in zip(keys(made, phase), keys(made, phase)[1:]):
            assert order.before((0, earlier), (0, later))
            down = step[2].order == "snake" and later.block % 2
            assert earlier.block != later.block or later.micro_batch - earlier.micro_batch == (
                -1 if down else 1
            )


@pytest.mark.slow
def test_what_is_kept_is_there_before_it_is_wanted_again():
    for work, placement, shape in grid((3,)):
        made = vertical(work, placement, shape)
        order = Order(made)
        for store in keys(made, "store_input"):
            at = (store.block, store.micro_batch)
            assert order.before((0, Key("download_input", *at)), (0, store))
            assert order.before((0, Key("forward", *at)), (0, store))
            assert order.before((0, store), (0, Key("load_input", *at)))
        for upload in keys(made, "upload_input"):
            at = (upload.block, upload.micro_batch)
            assert order.before((0, Key("download_input", *at)), (0, upload))
            assert order.before((0, upload), (0, Key(upload.phase, *at)))
        for grad in keys(made, "upload_input_grad"):
            at = (grad.block, grad.micro_batch)
            assert order.before((0, Key("download_input_grad", *at)), (0, grad))
            assert order.before((0, grad), (0, Key("backward", grad.block - 1, grad.micro_batch)))


@pytest.mark.parametrize("clipping", ["none", "defer", "per_block"])
def test_the_first_update_is_of_the_block_that_is_wanted_first(clipping):
    made = vertical(uneven(4), BlockPlacement.fractions(4), StepShape(micro_batches=2, clipping=clipping))
    updated = [key.block for key in keys(made, "update")]
    assert updated == ([0, 1, 2, 3] if clipping == "defer" else [3, 2, 1, 0])


def test_delayed_updates_come_last_and_in_the_order_in_which_their_blocks_are_wanted():
    shape = StepShape(micro_batches=2, delayed_fraction=0.5)
    made = vertical(uneven(6), BlockPlacement.fractions(6), shape)
    assert [key.block for key in keys(made, "update")] == [4, 2, 0, 1, 3, 5]
    last = next(index for index, op in reversed(list(enumerate(made))) if op.key.kind == "backward")
    delayed = [index for index, op in enumerate(made) if op.key.kind == "update" and op.key.block % 2]
    assert min(delayed) > last


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_where_a_snake_turns_nothing_crosses(step):
    """The first micro-batch of a block is the last of the block before: no transfer lies between the two."""
    made = vertical(step[0], step[1], replace(step[2], order="snake"))
    crossed = set(keys(made, "upload_input", "upload_input_grad", "download_input_grad"))
    computed = [op.key for op in made if op.key.kind in ("forward", "backward")]
    for before, after in pairwise(computed):
        if before.block == after.block:
            continue
        assert before.micro_batch == after.micro_batch
        assert Key("upload_input", after.block, after.micro_batch, "forward") not in crossed
        if before.kind == "backward":
            place = (before.block, before.micro_batch)
            assert not crossed & {Key("upload_input_grad", *place), Key("download_input_grad", *place)}
