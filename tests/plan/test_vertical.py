"""The vertical order: sound for every step, exact in its bytes, and in the right order."""

import pytest
from hypothesis import given, settings

from holdfast.plan import ops
from holdfast.plan.ops import Key
from holdfast.plan.vertical import commit_only, forward_only, vertical
from holdfast.plan.work import Placement, StepShape, Work
from plan_steps import Order, equal_blocks, grid, keys, steps, uneven


def expected_traffic(work: Work, placement: Placement, shape: StepShape) -> dict[tuple[str, str], int]:
    """Section 2 of the facts about vertical scheduling, block by block: parameters cross twice and gradients
    once, whatever M. The additions: the last block crosses once, and so do its inputs in forward; block 0's
    input is made by the prologue; commits write what stays in memory; with clipping, gradients may wait on
    the SSD."""
    n, m, s = len(work.blocks), shape.micro_batches, work.input_bytes
    moved = dict.fromkeys(
        (
            "load_params",
            "load_state",
            "load_input",
            "load_grads",
            "store_params",
            "store_state",
            "store_grads",
        ),
        0,
    )
    moved["upload_params"] = moved["download_grads"] = moved["store_input"] = 0
    for i, b in enumerate(work.blocks):
        passes = 1 if i == n - 1 else 2
        moved["upload_params"] += passes * b.param_bytes
        moved["download_grads"] += b.grad_bytes
        if not placement.params[i]:
            moved["load_params"] += passes * b.param_bytes
            moved["store_params"] += b.trained_param_bytes
        if not placement.optimizer[i]:
            moved["load_state"] += b.state_bytes
        if not placement.optimizer[i] or shape.commit:
            moved["store_state"] += b.state_bytes
        if shape.clip and not placement.gradients[i]:
            moved["load_grads"] += b.grad_bytes
            moved["store_grads"] += b.grad_bytes
        if not placement.activations[i] and i < n - 1:
            moved["load_input"] += m * s
            moved["store_input"] += m * s
    if n > 1:
        moved["download_input"] = n * m * s
        moved["upload_input"] = (n - 2) * m * s + n * m * s
        moved["download_input_grad"] = moved["upload_input_grad"] = (n - 1) * m * s
    if shape.commit:
        moved["store_resident"] = work.resident_state_bytes
    if not work.unified:
        moved["download_resident_grads"] = work.resident_grad_bytes
        moved["upload_resident"] = work.resident_param_bytes
    lanes = {"load": "ssd_read", "store": "ssd_write", "upload": "upload", "download": "download"}
    return {(lanes[kind.split("_")[0]], kind): nbytes for kind, nbytes in moved.items() if nbytes}


def test_every_step_of_the_grid_is_sound_and_moves_the_bytes_of_the_formulas():
    for work, placement, shape in grid():
        made = vertical(work, placement, shape)
        ops.check(made)
        assert ops.traffic(made) == expected_traffic(work, placement, shape)


@given(step=steps())
@settings(max_examples=150, deadline=None)
def test_every_placement_is_sound_and_moves_the_bytes_of_the_formulas(step):
    made = vertical(*step)
    ops.check(made)
    assert ops.traffic(made) == expected_traffic(*step)


def test_equal_blocks_move_the_sums_of_the_papers():
    n, m, p, s = 10, 7, 1000, 4096
    shape = StepShape(micro_batches=m)
    made = vertical(
        equal_blocks(n, p, tokens=1, input_bytes=s), Placement.fractions(n, activations=0.0), shape
    )
    lanes = ops.lane_bytes(made)
    d, g, state = 2, 4, 12
    between_blocks = (
        5 * m * n * s - 4 * m * s
    )  # 5M per block; the last runs no forward, block 0 takes no input
    assert lanes["upload"] + lanes["download"] == (2 * n - 1) * d * p + n * g * p + between_blocks
    assert lanes["ssd_read"] == (2 * n - 1) * d * p + n * state * p + (n - 1) * m * s
    assert lanes["ssd_write"] == n * d * p + n * state * p + (n - 1) * m * s


def test_an_evaluation_loads_each_block_once_and_changes_nothing():
    for work, placement, shape in grid():
        made = forward_only(work, placement, shape)
        ops.check(made)
        n, m, s = len(work.blocks), shape.micro_batches, work.input_bytes
        on_ssd = sum(b.param_bytes for b, stays in zip(work.blocks, placement.params) if not stays)
        expected = {
            ("ssd_read", "load_params"): on_ssd,
            ("upload", "upload_params"): sum(b.param_bytes for b in work.blocks),
            ("download", "download_input"): (n - 1) * m * s,
            ("upload", "upload_input"): (n - 1) * m * s,
        }
        assert ops.traffic(made) == {key: nbytes for key, nbytes in expected.items() if nbytes}


def test_saving_writes_what_stays_in_memory_and_commits():
    for work, placement, _ in grid():
        made = commit_only(work, placement)
        ops.check(made)
        stays = sum(b.state_bytes for b, here in zip(work.blocks, placement.optimizer) if here)
        assert ops.lane_bytes(made) == {"ssd_write": stays + work.resident_state_bytes}
        assert made[-1].key == Key("commit")


# Order. Every claim holds for lanes of any speed: it is looked up in the dependencies.


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_no_update_starts_before_all_losses_are_known(step):
    made = vertical(*step)
    order = Order(made)
    for update in keys(made, "update", "update_resident"):
        assert order.before((0, Key("check_losses")), (0, update))
        if step[2].clip:
            assert order.before((0, Key("norm")), (0, update))
            for measured in keys(made, "norm_block"):
                assert order.before((0, measured), (0, update))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_an_update_has_the_gradients_of_all_micro_batches(step):
    made = vertical(*step)
    order = Order(made)
    for block in range(len(step[0].blocks)):
        for m in range(step[2].micro_batches):
            assert order.before((0, Key("backward", block, m)), (0, Key("update", block)))
        for moved in keys(made, "load_grads", "store_grads", "download_grads", "load_state"):
            if moved.block == block:
                assert order.before((0, moved), (0, Key("update", block)))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_the_commit_is_last_and_after_every_store(step):
    work, placement, shape = step
    made = vertical(
        work, placement, StepShape(micro_batches=shape.micro_batches, clip=shape.clip, commit=True)
    )
    order = Order(made)
    stores = keys(made, "store_state", "store_resident")
    assert made[-1].key == Key("commit")
    assert len(stores) == len(work.blocks) + 1
    for store in stores:
        assert order.before((0, store), (0, Key("commit")))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_the_next_step_computes_with_updated_parameters(step):
    made, n = vertical(*step), len(step[0].blocks)
    order = Order(made, made)
    for following in [key for key in keys(made, "forward", "backward") if key.micro_batch == 0]:
        assert order.before((0, Key("update_resident")), (1, following))
        assert order.before((0, Key("update", following.block)), (1, following))
    for block in [b for b in range(n) if not step[1].params[b]]:
        for load in keys(made, "load_params"):
            if load.block == block:
                assert order.before((0, Key("store_params", block)), (1, load))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_an_evaluation_computes_with_updated_parameters(step):
    work, placement, shape = step
    made = forward_only(work, placement, shape)
    order = Order(vertical(work, placement, shape), made)
    for computed in keys(made, "evaluate"):
        assert order.before((0, Key("update", computed.block)), (1, computed))
        assert order.before((0, Key("update_resident")), (1, computed))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_state_is_never_written_before_the_previous_commit(step):
    work, placement, shape = step
    committing = StepShape(micro_batches=shape.micro_batches, clip=shape.clip, commit=True)
    made, following = vertical(work, placement, committing), vertical(work, placement, shape)
    order = Order(made, following)
    for store in keys(following, "store_state", "store_resident"):
        assert order.before((0, Key("commit")), (1, store))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_state_is_read_and_changed_only_after_it_was_written(step):
    made = vertical(*step)
    order = Order(made, made)
    for store in keys(made, "store_state"):
        assert order.before((0, store), (1, Key("update", store.block)))
        if not step[1].optimizer[store.block]:
            assert order.before((0, store), (1, Key("load_state", store.block)))
    if step[2].commit:
        assert order.before((0, Key("store_resident")), (1, Key("update_resident")))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_a_save_commits_what_earlier_steps_wrote(step):
    work, placement, shape = step
    quiet = vertical(
        work, placement, StepShape(micro_batches=shape.micro_batches, clip=shape.clip, commit=False)
    )
    order = Order(quiet, commit_only(work, placement))
    for block in range(len(work.blocks)):
        assert order.before((0, Key("update", block)), (1, Key("commit")))
    for store in keys(quiet, "store_state"):
        assert order.before((0, store), (1, Key("commit")))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_micro_batches_go_in_ascending_order(step):
    made = vertical(*step)
    order = Order(made)
    for phase in ("forward", "backward"):
        for earlier, later in zip(keys(made, phase), keys(made, phase)[1:]):
            assert order.before((0, earlier), (0, later))
            assert earlier.block != later.block or earlier.micro_batch + 1 == later.micro_batch


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


@pytest.mark.parametrize("clip", [False, True])
def test_the_first_update_is_of_the_block_that_is_wanted_first(clip):
    made = vertical(uneven(4), Placement.fractions(4), StepShape(micro_batches=2, clip=clip))
    updated = [key.block for key in keys(made, "update")]
    assert updated == ([0, 1, 2, 3] if clip else [3, 2, 1, 0])


def test_gradients_are_measured_where_they_are_summed_before_they_leave():
    for work, placement, shape in grid((3,)):
        made = vertical(work, placement, shape)
        order = Order(made)
        measured = keys(made, "norm_block")
        assert [key.block for key in measured] == ([2, 1, 0] if shape.clip else [])
        for norm in measured:
            final = shape.micro_batches - 1
            assert order.before((0, Key("backward", norm.block, final)), (0, norm))
            assert order.before((0, norm), (0, Key("download_grads", norm.block, final)))
