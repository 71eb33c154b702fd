"""fp16 with a loss scale that moves as that of ``torch.amp.GradScaler``, through resumes too."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast import LossScale
from holdfast.errors import BadInput
from holdfast.store.run_store import LocalStore
from plain_loops import MOVING, STEPS, Task, check, model_with_a_frozen_parameter, plain_loop
from support.grouped import grouped
from training import adamw, batches, warm_up


def engine_of(directory, **options):
    model = model_with_a_frozen_parameter(dropout=0.1)
    optimizer = adamw(model)
    options = {"dtype": "fp16", "loss_scale": MOVING, **options}
    return holdfast.offload(model, optimizer, directory, **grouped(scheduler=warm_up(optimizer), **options))


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_own_scale(tmp_path):
    """Also one that was resumed right after a step that had lowered it."""
    task = Task(count=3, clip_norm=0.8, precision="fp16", dropout=0.1, steps=STEPS + 2)
    scales = plain_loop(task).scales
    fallen = next(step for step in range(3, task.steps) if scales[step] < scales[step - 1])
    check(tmp_path, task, *((stop, {}) for stop in (1, fallen, task.steps)), clipping="speculate")


@pytest.mark.slow
def test_a_save_between_commits_has_the_scale_of_the_next_step(tmp_path):
    scales = plain_loop(Task(count=1, precision="fp16", dropout=0.1)).scales
    with engine_of(tmp_path, commit_every=0) as engine:
        for step in range(4):
            engine.step(batches(step, 1))
        engine.save()
        manifest = LocalStore.read(tmp_path, direct=False).head()
        assert manifest.progress["loss_scale"]["scale"] == scales[4]


def test_a_scale_that_falls_for_ever_stays_one():
    scale = LossScale()
    for _ in range(300):
        scale = scale.after(skipped=True)
    assert scale.scale == 2.0**-149


@pytest.mark.parametrize("scale, interval, outcomes", [
    (1000.1, 2, "++-++-+-"),
    (3.0e38, 1, "+++-"),
    (1e-38, 2, "----++++"),
])  # fmt: skip
def test_the_scale_moves_as_torchs_does(scale, interval, outcomes):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    scaler.scale(torch.ones(()))
    moving = LossScale(scale=scale, growth_interval=interval)
    for outcome in outcomes:
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.full((1,), 0.0 if outcome == "+" else torch.inf)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        assert moving.scale == scaler.get_scale()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moving = moving.after(outcome == "-")
        assert (moving.scale, moving.good_steps) == (scaler.get_scale(), scaler._get_growth_tracker())


# Bad input


@pytest.mark.parametrize(
    "options, says",
    [
        ({"clipping": "per_block", "clip_norm": 1.0}, "which the clipping mode 'per_block' knows too late"),
        ({"dtype": "bf16"}, "loss_scale is of fp16, and the precision is 'bf16'"),
        ({"loss_scale": 1024.0}, r"write holdfast.LossScale\(scale=1024.0\)"),
    ],
)
def test_scaling_that_cannot_be_is_refused_before_anything_is_written(tmp_path, options, says):
    with pytest.raises(BadInput, match=says):
        engine_of(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"scale": 0.0}, "scale = 0.0 must be a positive number"),
        ({"scale": float("inf")}, "scale = inf must be a positive number"),
        ({"growth_factor": 1.0}, "growth_factor = 1.0 must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor = 1.0 must lie between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval = 0 must be at least 1"),
        ({"good_steps": -1}, "good_steps = -1 must not be negative"),
    ],
)
def test_a_scale_that_is_none_is_refused(wrong, says):
    with pytest.raises(BadInput, match=says):
        LossScale(**wrong)
