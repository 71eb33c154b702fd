"""Blocks that are not computed again in the backward pass: the bits of a loop that keeps all of its graph."""

from __future__ import annotations

import pytest

import holdfast
from combined import one_in
from holdfast.errors import BadInput
from holdfast.offload.setup import run_planning
from offload.test_overlap import check_snake
from plain_loops import PLACEMENTS, STEPS, check
from streams import Apart
from support.grouped import grouped
from training import adamw, batches, decoder, differing, read_atoms, stored

PARTS = [0.0, 0.5]


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "num_micro_batches, placement, recomputed_fraction, clip_norm, schedule",
    one_in(4, [1, 2, 3, 5], PLACEMENTS, PARTS, [None, 0.5], ["vertical", "horizontal"]),
)
def test_steps_have_every_bit_of_a_plain_loop(
    tmp_path, num_micro_batches, placement, recomputed_fraction, clip_norm, schedule
):
    options = {"recomputed_fraction": recomputed_fraction, "schedule": schedule, **PLACEMENTS[placement]}
    check(tmp_path, STEPS, num_micro_batches, clip_norm, **options)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed_fraction", PARTS)
def test_dropout_draws_what_a_plain_loop_draws(tmp_path, recomputed_fraction):
    options = {"recomputed_fraction": recomputed_fraction, "delayed_fraction": 0.5, **PLACEMENTS["mixed"]}
    check(tmp_path, STEPS, 3, 0.5, dropout=0.2, **options)
    assert differing(read_atoms(tmp_path), stored(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("num_micro_batches, placement", one_in(2, [1, 2, 5], PLACEMENTS))
def test_a_snake_has_its_own_bits(tmp_path, num_micro_batches, placement):
    check_snake(tmp_path, num_micro_batches, 0.5, recomputed_fraction=0.5, **PLACEMENTS[placement])


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_same_bits_come_from_a_device_apart(tmp_path, monkeypatch, placement, schedule):
    monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    check(tmp_path, 4, 3, None, recomputed_fraction=0.5, schedule=schedule, **PLACEMENTS[placement])


def runs_of_blocks(directory, steps=1, **options):
    """How often each block's forward ran in ``steps`` of three micro-batches, and what was moved."""
    model, runs = decoder(blocks=4), [0] * 4
    for block, module in enumerate(model.blocks):

        def count(*_, block=block):
            runs[block] += 1

        next(module.children()).register_forward_pre_hook(count)
    with holdfast.offload(model, adamw(model), directory, **grouped(dtype="fp32", **options)) as engine:
        for step in range(steps):
            engine.step(batches(step, 3))
        engine.wait()
        moved = {kind: nbytes for (_, kind), nbytes in engine.traffic().items()}
    return runs, moved


def test_what_stays_is_computed_once_and_neither_it_nor_its_input_is_read_again(tmp_path):
    spilled = {"params_on_host": 0.0, "activations_on_host": 0.0}
    runs, again = runs_of_blocks(tmp_path / "again", **spilled)
    assert runs == [6, 6, 6, 3]
    runs, half = runs_of_blocks(tmp_path / "half", recomputed_fraction=1 / 3, **spilled)
    assert runs == [6, 3, 3, 3]
    runs, none = runs_of_blocks(tmp_path / "none", recomputed_fraction=0.0, **spilled)
    assert runs == [3, 3, 3, 3]
    assert again["store_input"] == 3 * half["store_input"] and "store_input" not in none
    assert [each["load_params"] // (again["load_params"] // 7) for each in (again, half, none)] == [7, 5, 4]


def test_the_fraction_may_change_from_resume_to_resume(tmp_path):
    whole = []
    for part in (1.0, 0.0, 0.5):
        model = decoder(blocks=3)
        with holdfast.offload(
            model,
            adamw(model),
            tmp_path / "turns",
            precision="fp32",
            placement=holdfast.Placement(recomputed_fraction=part),
        ) as engine:
            whole += [engine.step(batches(engine.steps_done, 2)) for _ in range(2)]
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path / "one", precision="fp32") as engine:
        assert [engine.step(batches(step, 2)) for step in range(6)] == whole
    assert differing(stored(tmp_path / "turns"), stored(tmp_path / "one")) == []


@pytest.mark.parametrize("part", [-0.1, 1.1, "most"])
def test_a_fraction_that_is_none_is_refused(tmp_path, part):
    model = decoder()
    with pytest.raises(BadInput, match="recomputed_fraction"):
        holdfast.offload(
            model, adamw(model), tmp_path / "run", placement=holdfast.Placement(recomputed_fraction=part)
        )
    assert not (tmp_path / "run").exists()
