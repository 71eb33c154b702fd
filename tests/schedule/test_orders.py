"""What every order of a training step must satisfy: it is sound, exact in its bytes, and nothing comes too early.

Claims about what comes before what hold for lanes of any speed: they are looked up in the dependencies.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from holdfast.schedule import operations
from holdfast.schedule.operations import GUESS, Key, as_guessed
from holdfast.schedule.step_builder import STAYING_BYTES
from holdfast.schedule.work import BlockPlacement, StepShape, Work
from plan_steps import SCHEDULES, Order, grid, keys, steps
from support.schedules import check_schedule

LANES = {"load": "ssd_read", "store": "ssd_write", "upload": "upload", "download": "download"}
"""By the first word of an operation's kind."""

every_order = pytest.mark.parametrize("order", sorted(SCHEDULES))


def expected_traffic(
    order: str, work: Work, placement: BlockPlacement, shape: StepShape, redone: bool = True
) -> dict:
    """Section 2 of the facts about vertical scheduling, block by block. Vertical: parameters cross twice and
    gradients once, whatever M. Horizontal: parameters 2M times and the growing sum of gradients 2M-1 times.

    The additions: the last block runs no forward pass of its own; block 0's input is made by the prologue;
    commits write what stays in memory; gradients that wait (in the horizontal order, with clipping, and those
    of delayed updates) may do so on the SSD, in the horizontal order at every micro-batch. Delaying moves
    nothing else, and no update twice. A guess that was wrong reads and writes a block's state once more, wherever
    that lives, and writes its parameters once more; gradients on the SSD are read only then. A block that is not
    computed again needs neither its parameters nor its input a second time. The parameters of a tied block cross once
    more for the last one, and its sum leaves a separate device in between. A compute copy that is a part of the
    masters is written with them, and read by an update only where no copy is in memory.
    """
    n, m, s = len(work.blocks), shape.micro_batches, work.input_bytes
    vertical = order == "vertical"
    in_state = [
        b.is_split and not (p or o) for b, p, o in zip(work.blocks, placement.params, placement.optimizer)
    ]
    sums = 1 if vertical else m
    moved = dict.fromkeys(("load_params", "load_state", "load_input", "load_grads", "store_params"), 0)
    moved |= dict.fromkeys(("store_state", "store_grads", "store_input"), 0)
    moved |= dict.fromkeys(("upload_params", "upload_grads", "download_grads"), 0)
    for i, b in enumerate(work.blocks):
        guessed = is_guessed(order, shape, i, n)
        kept = is_kept(shape, i, n)
        tied = i == work.tied_block
        passes = (1 + tied if i == n - 1 or kept else 2 + tied) * sums
        parked = sums * b.grad_bytes * (tied and not work.unified)
        moved["upload_params"] += passes * b.param_bytes
        moved["download_grads"] += sums * b.grad_bytes + parked
        moved["upload_grads"] += (sums - 1) * b.grad_bytes + parked
        if not placement.params[i]:
            moved["load_params"] += passes * b.param_bytes
            moved["store_params"] += 0 if in_state[i] else b.trained_param_bytes
        if not placement.optimizer[i]:
            soon = vertical and shape.clipping != "defer" and not is_delayed(shape, i, n)
            held = in_state[i] and soon and placement.saving.keeps_copies and not kept
            rest = held or (b.is_split and placement.params[i])
            moved["load_state"] += sum(t.rest_bytes for t in b.tiles) if rest else b.state_bytes
        if not placement.optimizer[i] or shape.commit:
            moved["store_state"] += b.state_bytes
        if not placement.gradients[i] and (shape.keeps_grads or not vertical or is_delayed(shape, i, n)):
            moved["store_grads"] += sums * b.grad_bytes
            moved["load_grads"] += sums * b.grad_bytes * (redone or not guessed)
        if guessed and redone:
            moved["load_state"] += b.state_bytes
            moved["store_state"] += b.state_bytes
            moved["store_params"] += 0 if placement.params[i] or in_state[i] else b.trained_param_bytes
        if not placement.activations[i] and i < n - 1 and not kept:
            moved["load_input"] += m * s
            moved["store_input"] += m * s
    stay = not work.unified and placement.saving.inputs_stay and s * m <= STAYING_BYTES
    moved |= between_blocks(order, n, m, s, shape.order == "snake", stay)
    if n > 1:
        moved["upload_input"] -= sum(is_kept(shape, i, n) for i in range(n)) * m * s
    if shape.commit or not placement.saving.resident_state:
        moved["store_resident"] = work.resident_state_bytes
    if not placement.saving.resident_state:
        moved["load_resident"] = work.resident_state_bytes
    if not work.unified:
        moved["download_resident_grads"] = work.resident_grad_bytes
        moved["upload_resident"] = work.resident_trained_param_bytes
    return {(LANES[kind.split("_")[0]], kind): nbytes for kind, nbytes in moved.items() if nbytes}


def is_delayed(shape: StepShape, block: int, n: int) -> bool:
    """Is this one of the ``delayed_fraction`` of ``n`` blocks, the last of every so many?"""
    chosen = round(shape.delayed_fraction * n)
    return bool(chosen) and (block + 1) * chosen // n != block * chosen // n


def is_kept(shape: StepShape, block: int, n: int) -> bool:
    """Is it not computed again: one of the rest of the ``recomputed_fraction`` of the blocks before the last?"""
    chosen = round((1 - shape.recomputed_fraction) * (n - 1))
    return block < n - 1 and (block + 1) * chosen // (n - 1) != block * chosen // (n - 1)


def is_guessed(order: str, shape: StepShape, block: int, n: int) -> bool:
    """Is it updated before the norm is known, although that decides about it?"""
    return order == "vertical" and shape.clipping == "speculate" and not is_delayed(shape, block, n)


def between_blocks(order: str, n: int, m: int, s: int, snake: bool, stay: bool) -> dict[str, int]:
    """In the horizontal order, and where all stay on a separate device, the last block's inputs and the gradients
    between blocks never leave, and other inputs come back for the backward pass alone. A snake saves three transfers
    where it turns, and the last block's first input needs not be kept."""
    if order == "horizontal" or (stay and n > 1):
        return {"download_input": (n - 1) * m * s, "upload_input": (n - 1) * m * s}
    if n == 1:
        return {}
    turns = n - 1 if snake else 0
    grads = {"download_input_grad": (n - 1) * m - turns, "upload_input_grad": (n - 1) * m - turns}
    moved = {"download_input": n * m - snake, "upload_input": (n - 2) * m + n * m - turns, **grads}
    return {kind: count * s for kind, count in moved.items()}


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@every_order
def test_every_step_of_the_grid_is_sound_and_moves_the_bytes_of_the_formulas(order):
    for step in grid():
        made = SCHEDULES[order](*step)
        check_schedule(made)
        assert operations.traffic(made) == expected_traffic(order, *step)
        assert operations.traffic(as_guessed(made)) == expected_traffic(order, *step, redone=False)


@every_order
@given(step=steps())
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_every_placement_is_sound_and_nothing_comes_too_early(order, step):
    work, placement, shape = step
    made = SCHEDULES[order](*step)
    check_schedule(made)
    assert operations.traffic(made) == expected_traffic(order, *step)
    before = Order(made, made).before
    check_updates_know_losses_and_norm(order, shape, made, before)
    check_updates_have_all_gradients(work, shape, made, before)
    check_next_step_has_updated_parameters(step, made, before)
    check_state_is_used_after_it_was_written(placement, made, before)
    check_gradients_stay_until_every_tile_is_updated(made, before)
    committed = SCHEDULES[order](work, placement, replace(shape, commit=True))
    check_commit(work, committed, made, Order(committed, made).before)


def check_updates_know_losses_and_norm(order, shape, made, before):
    for update in keys(made, "update", "update_resident"):
        assert before((0, Key("check_losses")), (0, update))
        if shape.keeps_grads and update.phase != GUESS:
            assert before((0, Key("norm")), (0, update))
            for measured in keys(made, "norm_block"):
                assert before((0, measured), (0, update))
        if order == "horizontal":
            assert before((0, Key("backward", 0, shape.micro_batches - 1)), (0, update))


def check_updates_have_all_gradients(work, shape, made, before):
    for block in range(len(work.blocks)):
        for m in range(shape.micro_batches):
            assert before((0, Key("backward", block, m)), (0, Key("update", block)))
    for moved in keys(made, "load_grads", "store_grads", "download_grads", "load_state"):
        assert before((0, moved), (0, Key("update", moved.block, tile=moved.tile)))


def check_next_step_has_updated_parameters(step, made, before):
    for following in keys(made, "forward", "backward"):
        updates = [
            key for key in keys(made, "update_resident", "update") if key.block in (-1, following.block)
        ]
        assert len({key.kind for key in updates}) == 2
        assert all(before((0, key), (1, following)) for key in updates)
    for load in keys(made, "load_params"):
        kind = "store_state" if in_state(step, load.block) else "store_params"
        stores = [key for key in keys(made, kind) if key.block == load.block]
        assert stores and all(before((0, key), (1, load)) for key in stores)


def check_state_is_used_after_it_was_written(placement, made, before):
    for store in keys(made, "store_state"):
        assert before((0, store), (1, Key("update", store.block, tile=store.tile)))
        if not placement.optimizer[store.block]:
            assert before((0, store), (1, Key("load_state", store.block, tile=store.tile)))
    for store in keys(made, "store_resident"):
        assert before((0, store), (1, Key("update_resident", tile=store.tile)))
        if not placement.saving.resident_state:
            assert before((0, store), (1, Key("load_resident", tile=store.tile)))


def check_gradients_stay_until_every_tile_is_updated(made, before):
    givers = [op for op in made if op.key.kind == "update" and op.key.phase != GUESS and op.gives]
    assert len(givers) == len({op.key.block for op in givers})
    for op in givers:
        for other in keys(made, "update"):
            assert other.block != op.key.block or other == op.key or before((0, other), (0, op.key))


def check_commit(work, committed, following, before):
    """It is last, after every store, and before any store of the step that follows."""
    stores = keys(committed, "store_state", "store_resident")
    assert committed[-1].key == Key("commit")
    parts = [*(block.tiles for block in work.blocks), work.resident_tiles]
    assert len([key for key in stores if key.phase != GUESS]) == sum(map(len, parts))
    assert all(before((0, store), (0, Key("commit"))) for store in stores)
    for store in keys(following, "store_state", "store_resident"):
        assert before((0, Key("commit")), (1, store))


@pytest.mark.slow
@every_order
def test_gradients_are_measured_where_they_are_summed_before_they_leave(order):
    for work, placement, shape in grid((3,)):
        made = SCHEDULES[order](work, placement, shape)
        before = Order(made).before
        measured = keys(made, "norm_block")
        assert [key.block for key in measured] == ([2, 1, 0] if shape.clipping != "none" else [])
        for norm in measured:
            final = shape.micro_batches - 1
            assert before((0, Key("backward", norm.block, final)), (0, norm))
            assert before((0, norm), (0, Key("download_grads", norm.block, final)))


def in_state(step, block: int) -> bool:
    """Do passes read the compute copy from the files of the state?"""
    work, placement, _ = step
    return work.blocks[block].is_split and not (placement.params[block] or placement.optimizer[block])
