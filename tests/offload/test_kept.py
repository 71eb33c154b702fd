"""Blocks that are not computed again in the backward pass run once, and they and their inputs are read once."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.errors import BadInput
from support.grouped import grouped
from training import adamw, batches, decoder, differing, stored


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
