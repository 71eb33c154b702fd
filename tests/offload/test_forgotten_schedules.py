"""A scheduler that the script steps itself: with a metric it is given and kept, without being given it is told of."""

from __future__ import annotations

import pytest
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import holdfast
from training import adamw, batches, decoder


def rates(run, steps, every=2):
    """The learning rates of ``steps`` steps, lowered by a metric that is asked for at the top of the loop."""
    model = decoder(blocks=2)
    optimizer = adamw(model)
    plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    seen = []
    with holdfast.offload(model, optimizer, run, scheduler=plateau, precision="fp32") as engine:
        while engine.steps_done < steps:
            if engine.steps_done % every == 0:
                plateau.step(engine.evaluate(batches(0, 1)))
            seen.append(optimizer.param_groups[0]["lr"])
            engine.step(batches(engine.steps_done, 1))
    return seen


@pytest.mark.slow
def test_a_plateau_goes_on_where_it_was(tmp_path):
    whole = rates(tmp_path / "whole", 8)
    assert len(set(whole)) > 2
    for upto in (3, 4):
        run = tmp_path / f"run {upto}"
        assert rates(run, upto) + rates(run, 8) == whole


def test_a_scheduler_beside_the_engine_is_told(tmp_path):
    model = decoder(blocks=2)
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with (
        holdfast.offload(model, optimizer, tmp_path / "run", precision="fp32") as engine,
        pytest.warns(UserWarning, match="LambdaLR moves learning rates and was not given"),
    ):
        engine.step(batches(0, 1))
        scheduler.step()
