"""The horizontal order: sound for every step, exact in its bytes, and in the right order."""

from hypothesis import given, settings

from holdfast.plan import ops
from holdfast.plan.horizontal import horizontal
from holdfast.plan.ops import Key
from holdfast.plan.work import Placement, StepShape, Work
from plan_steps import Order, equal_blocks, grid, keys, steps


def expected_traffic(work: Work, placement: Placement, shape: StepShape) -> dict[tuple[str, str], int]:
    """Section 2 of the facts, block by block: parameters cross 2M times and the growing sum of gradients
    2M-1 times. The additions: the last block is not loaded twice in a row, its inputs and the gradients
    between blocks never leave the device; where the sum may not stay, it is written M times and read M
    times, the last for the update; commits write what stays in memory."""
    n, m, s = len(work.blocks), shape.micro_batches, work.input_bytes
    moved = dict.fromkeys(("load_params", "load_state", "load_input", "load_grads", "store_params"), 0)
    moved |= dict.fromkeys(("store_state", "store_grads", "store_input"), 0)
    moved |= dict.fromkeys(("upload_params", "upload_grads", "download_grads"), 0)
    for i, b in enumerate(work.blocks):
        passes = m * (1 if i == n - 1 else 2)
        moved["upload_params"] += passes * b.param_bytes
        moved["download_grads"] += m * b.grad_bytes
        moved["upload_grads"] += (m - 1) * b.grad_bytes
        if not placement.params[i]:
            moved["load_params"] += passes * b.param_bytes
            moved["store_params"] += b.trained_param_bytes
        if not placement.optimizer[i]:
            moved["load_state"] += b.state_bytes
        if not placement.optimizer[i] or shape.commit:
            moved["store_state"] += b.state_bytes
        if not placement.gradients[i]:
            moved["store_grads"] += m * b.grad_bytes
            moved["load_grads"] += (m - 1) * b.grad_bytes + b.grad_bytes
        if not placement.activations[i] and i < n - 1:
            moved["load_input"] += m * s
            moved["store_input"] += m * s
    moved["download_input"] = moved["upload_input"] = (n - 1) * m * s
    if shape.commit:
        moved["store_resident"] = work.resident_state_bytes
    if not work.unified:
        moved["download_resident_grads"] = work.resident_grad_bytes
        moved["upload_resident"] = work.resident_param_bytes
    lanes = {"load": "ssd_read", "store": "ssd_write", "upload": "upload", "download": "download"}
    return {(lanes[kind.split("_")[0]], kind): nbytes for kind, nbytes in moved.items() if nbytes}


def test_every_step_of_the_grid_is_sound_and_moves_the_bytes_of_the_formulas():
    for work, placement, shape in grid():
        made = horizontal(work, placement, shape)
        ops.check(made)
        assert ops.traffic(made) == expected_traffic(work, placement, shape)


@given(step=steps())
@settings(max_examples=150, deadline=None)
def test_every_placement_is_sound_and_moves_the_bytes_of_the_formulas(step):
    made = horizontal(*step)
    ops.check(made)
    assert ops.traffic(made) == expected_traffic(*step)


def test_equal_blocks_move_the_sums_of_the_papers():
    n, m, p, s = 10, 7, 1000, 4096
    work = equal_blocks(n, p, tokens=1, input_bytes=s)
    made = horizontal(work, Placement.fractions(n), StepShape(micro_batches=m))
    lanes = ops.lane_bytes(made)
    d, g, state = 2, 4, 12
    crossing = m * (2 * n - 1) * d * p + (2 * m - 1) * n * g * p + 2 * m * (n - 1) * s
    assert lanes["upload"] + lanes["download"] == crossing
    assert lanes["ssd_read"] == m * (2 * n - 1) * d * p + n * state * p
    assert lanes["ssd_write"] == n * d * p + n * state * p


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_updates_wait_for_all_losses_all_gradients_and_the_norm(step):
    made = horizontal(*step)
    order = Order(made)
    for update in keys(made, "update", "update_resident"):
        assert order.before((0, Key("check_losses")), (0, update))
        assert order.before((0, Key("backward", 0, step[2].micro_batches - 1)), (0, update))
        if step[2].clip:
            assert order.before((0, Key("norm")), (0, update))
    for moved in keys(made, "download_grads", "store_grads", "load_grads", "load_state"):
        assert order.before((0, moved), (0, Key("update", moved.block)))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_sums_grow_in_the_order_of_the_micro_batches(step):
    made = horizontal(*step)
    order = Order(made)
    for upload in keys(made, "upload_grads"):
        block, m = upload.block, upload.micro_batch
        assert order.before((0, Key("backward", block, m - 1)), (0, Key("download_grads", block, m - 1)))
        assert order.before((0, Key("download_grads", block, m - 1)), (0, upload))
        assert order.before((0, upload), (0, Key("backward", block, m)))


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_steps_follow_each_other_as_in_the_vertical_order(step):
    work, placement, shape = step
    committing = StepShape(micro_batches=shape.micro_batches, clip=shape.clip, commit=True)
    made = horizontal(work, placement, committing)
    order = Order(made, made)
    assert made[-1].key == Key("commit")
    for computed in keys(made, "forward", "backward"):
        assert order.before((0, Key("update", computed.block)), (1, computed))
        assert order.before((0, Key("update_resident")), (1, computed))
    for store in keys(made, "store_state", "store_resident"):
        assert order.before((0, store), (0, Key("commit")))
        assert order.before((0, Key("commit")), (1, store))


def test_a_spilled_sum_is_read_after_it_was_written_and_written_after_it_was_read():
    shape = StepShape(micro_batches=3, clip=True)
    for work, _, _ in grid((3,)):
        made = horizontal(work, Placement.fractions(3, gradients=0.0), shape)
        order = Order(made)
        for block in range(3):
            for m in range(3):
                store, load = (0, Key("store_grads", block, m)), (0, Key("load_grads", block, m))
                assert order.before(store, load)
                if m < 2:
                    assert order.before(load, (0, Key("store_grads", block, m + 1)))


def test_gradients_are_measured_where_they_are_summed_before_they_leave():
    for work, placement, shape in grid((3,)):
        made = horizontal(work, placement, shape)
        order = Order(made)
        measured = keys(made, "norm_block")
        assert [key.block for key in measured] == ([2, 1, 0] if shape.clip else [])
        for norm in measured:
            final = shape.micro_batches - 1
            assert order.before((0, Key("backward", norm.block, final)), (0, norm))
            assert order.before((0, norm), (0, Key("download_grads", norm.block, final)))
