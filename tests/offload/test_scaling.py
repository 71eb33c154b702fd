"""fp16 with a loss scale: the bits of a loop with ``torch.amp.GradScaler``, through overflows, growth and resumes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch

import holdfast
from combined import one_in
from holdfast import LossScale
from holdfast.errors import BadInput
from holdfast.offload.setup import run_planning
from holdfast.store.run_store import LocalStore
from plain_loops import PLACEMENTS, by_tokens, model_with_a_frozen_parameter, ragged
from streams import Apart
from support.grouped import grouped
from training import batches, differing, stored, warm_up

STEPS = 12
MOVING = {"scale": 2.0**22, "growth_interval": 2}
"""So large that the first steps overflow, and growing so soon that others do."""


def trained(model):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@cache
def scaled_loop(num_micro_batches, clip_norm, scale, growth_interval, tokens=False):
    """fp16 parameters compute; fp32 masters are stepped with scaled gradients summed in fp32."""
    model = model_with_a_frozen_parameter(dropout=0.1)
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in trained(model)}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    scheduler, losses, scales, states = warm_up(optimizer), [], [], []
    for p in model.parameters():
        p.data = p.data.half()
    with holdfast.keyed_rng(model) as keys:
        for step in range(STEPS):
            for name, p in trained(model):
                p.data = masters[name].detach().half()
            total = 0.0
            made = (ragged if tokens else batches)(step, num_micro_batches)
            for m, (batch, share) in enumerate(zip(made, by_tokens(made), strict=True)):
                keys.at(step, m)
                if not share:
                    continue
                loss = model(**batch)
                scaler.scale(loss * share if tokens else loss / num_micro_batches).backward()
                total += loss.item() * share if tokens else loss.item()
                for name, p in trained(model):
                    held = masters[name].grad
                    masters[name].grad = p.grad.float() if held is None else held + p.grad
                    p.grad = None
            scaler.unscale_(optimizer)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(masters.values(), clip_norm)
            scales.append(scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total if tokens else total / num_micro_batches)
            state = {f"{name}/param": p.detach().clone() for name, p in masters.items()}
            for name, p in masters.items():
                state |= {f"{name}/{slot}": value.clone() for slot, value in optimizer.state[p].items()}
            states.append(state)
    return losses, scales, states


def engine_of(directory, **options):
    model = model_with_a_frozen_parameter(dropout=0.1)
    optimizer = torch.optim.AdamW([p for _, p in trained(model)], lr=1e-2)
    options = {"dtype": "fp16", "loss_scale": LossScale(**MOVING), **options}
    return holdfast.offload(model, optimizer, directory, **grouped(scheduler=warm_up(optimizer), **options))


def check(directory, num_micro_batches, clip_norm, parts=((0, STEPS),), tokens=False, **options):
    losses, scales, states = scaled_loop(num_micro_batches, clip_norm, **MOVING, tokens=tokens)
    options["normalize"] = "tokens" if tokens else "micro_batches"
    for start, stop in parts:
        with engine_of(directory, clip_norm=clip_norm, **options) as engine:
            assert engine.steps_done == start
            for step in range(start, stop):
                assert engine.step((ragged if tokens else batches)(step, num_micro_batches)) == losses[step]
                assert engine.last["loss_scale"] == scales[step]
                overflown = step + 1 < STEPS and scales[step + 1] < scales[step]
                assert step + 1 == STEPS or (engine.last["skipped"] is not None) is overflown
    assert differing(stored(directory), states[-1]) == []


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "num_micro_batches, placement, clipping, clip_norm",
    one_in(3, [1, 3], PLACEMENTS, ["defer", "speculate"], [None, 0.8]),
)
def test_steps_have_every_bit_of_a_loop_with_a_grad_scaler(
    tmp_path, num_micro_batches, placement, clipping, clip_norm
):
    options = {"clipping": clipping, "delayed_fraction": 0.34, **PLACEMENTS[placement]}
    check(tmp_path, num_micro_batches, clip_norm, **options)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["defer", "speculate"])
def test_losses_by_tokens_have_them_too(tmp_path, clipping):
    check(tmp_path, 4, 0.8, tokens=True, clipping=clipping, **PLACEMENTS["mixed"])


def test_the_scale_of_the_loop_falls_and_grows():
    scales = scaled_loop(3, None, **MOVING)[1]
    fell, grew = (sum(up == (b > a) for a, b in pairwise(scales) if a != b) for up in (False, True))
    assert fell >= 3 and grew >= 2


@pytest.mark.slow
def test_the_horizontal_schedule_and_a_device_apart_have_them_too(tmp_path, monkeypatch):
    check(tmp_path / "horizontal", 3, 0.8, schedule="horizontal", **PLACEMENTS["mixed"])
    monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    check(tmp_path / "apart", 3, 0.8, clipping="speculate", **PLACEMENTS["mixed"])


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("clipping", ["defer", "speculate"])
def test_a_resumed_run_goes_on_with_its_own_scale(tmp_path, clipping):
    """Also one that was resumed right after a step that had lowered it."""
    scales = scaled_loop(3, 0.8, **MOVING)[1]
    fallen = next(step for step in range(5, STEPS) if scales[step] < scales[step - 1])
    parts = ((0, 1), (1, fallen), (fallen, STEPS))
    check(tmp_path, 3, 0.8, parts, clipping=clipping)


@pytest.mark.slow
def test_a_save_between_commits_has_the_scale_of_the_next_step(tmp_path):
    scales = scaled_loop(1, None, **MOVING)[1]
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
