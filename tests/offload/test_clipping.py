"""Clipping: what is guessed is made again in time, and steps without a norm or a target change nothing."""

from __future__ import annotations

import math
from collections import Counter
from threading import Lock

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput
from holdfast.offload.ops import KINDS, REDO
from holdfast.optim.host_optimizer import HostOptimizer, ParameterState
from holdfast.schedule.operations import GUESS
from plain_loops import PLACEMENTS, STEPS, Task, check, model_with_a_frozen_parameter, plain_loop, ragged
from support.grouped import grouped
from support.held_operations import Held
from training import adamw, batches, differing, stored, warm_up


def engine_of(directory, hook=None, **options):
    model = model_with_a_frozen_parameter()
    if hook is not None:
        model.head.register_forward_hook(hook)
    optimizer = adamw(model)
    options = {"dtype": "fp32", "scheduler": warm_up(optimizer), **options}
    return holdfast.offload(model, optimizer, directory, **grouped(**options))


# Updates that guess that nothing is clipped


@pytest.mark.slow
def test_guesses_are_made_again_while_the_disk_is_behind(tmp_path, monkeypatch):
    """Guessed states are written after the norm is known, and the first block's after it was updated again."""

    def guessed(first):
        return lambda run, op, step: op.key.phase == GUESS and (op.key.block == 0) is first

    most, last = (Held(monkeypatch, "store_state", guessed(first)) for first in (False, True))
    measure, update_again, again, lock = KINDS["norm"], REDO["update"], Counter(), Lock()

    def norm(run, op, step):
        measure(run, op, step)
        most.release(step.number)

    def update(run, op, step):
        update_again(run, op, step)
        with lock:
            again[step.number] += op.key.block < 2
            both = again[step.number] == 2
        if both:
            last.release(step.number)

    monkeypatch.setitem(KINDS, "norm", norm)
    monkeypatch.setitem(REDO, "update", update)
    check(tmp_path, Task(clip_norm=0.3), clipping="speculate", **PLACEMENTS["mixed"])
    assert most.steps == last.steps == again.keys() == set(range(STEPS))


def test_an_update_that_is_to_keep_its_gradient_works_on_a_copy():
    optimizer = HostOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0))
    for keep, left in ((True, 4.0), (False, 2.0)):
        state = ParameterState(torch.zeros(3), torch.full((3,), 4.0), {}, {"step": torch.ones(())}, None, 0)
        optimizer.update(state, optimizer.snapshot(), torch.tensor(0.5), keep_grad=keep)
        assert state.param.tolist() == [-2.0] * 3 and state.grad.tolist() == [left] * 3


# Steps whose norm is no number


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("clipping", ["defer", "speculate", "per_block"])
def test_a_loss_that_is_no_number_skips_the_whole_step(tmp_path, clipping):
    spoiled = batches(1, 2)
    spoiled[1] = {name: value[:, :-1] for name, value in spoiled[1].items()}

    def spoil(head, args, logits):
        return logits * math.nan if logits.shape[:2] == spoiled[1]["targets"].shape else logits

    with engine_of(tmp_path, spoil, clip_norm=0.5, clipping=clipping, **PLACEMENTS["mixed"]) as engine:
        engine.step(batches(0, 2))
        before = engine.state_dict()
        engine.step(spoiled)
        assert engine.last["skipped"] == "the loss of micro-batch 1 is nan"
        assert differing(engine.state_dict(), before) == []
        engine.step(batches(2, 2))
        assert engine.last["skipped"] is None and differing(engine.state_dict(), before) != []


class MaskedMean(nn.Module):
    """A sum divided by the number of targets: without any, its gradient is NaN, where that of a mean is zero."""

    def __init__(self, head_is_apart):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head, self.apart = nn.Linear(4, 3), nn.Linear(4, 3) if head_is_apart else None

    def forward(self, x, targets):
        for block in self.blocks:
            x = block(x)
        if self.apart is None:
            return self.loss(self.head(x), targets)
        mean = nn.functional.cross_entropy(self.head(x), targets)
        return mean + self.loss(self.apart(x.detach()), targets)

    @staticmethod
    def loss(logits, targets):
        counts = targets != -100
        each = nn.functional.cross_entropy(logits, targets.clamp(min=0), reduction="none")
        return (each * counts).sum() / counts.sum()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("head_is_apart", [False, True])
def test_a_gradient_of_nan_without_targets_skips_the_step(tmp_path, clip_norm, head_is_apart):
    model = MaskedMean(head_is_apart)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32", clipping=clip_norm) as engine:
        before = engine.state_dict()
        x, targets = torch.ones(2, 4), torch.tensor([0, 2])
        engine.step([{"x": x, "targets": targets}, {"x": x, "targets": targets * 0 - 100}])
        assert engine.last["skipped"] == "the loss of micro-batch 1 is nan"
        assert differing(engine.state_dict(), before) == []


# Losses by tokens


@pytest.mark.slow
def test_a_step_without_any_target_changes_no_weight(tmp_path):
    nothing = [batch | {"targets": torch.full_like(batch["targets"], -100)} for batch in batches(1, 2)]
    with engine_of(tmp_path, clip_norm=0.8, normalize="tokens") as engine:
        engine.step(ragged(0, 2))
        before = engine.state_dict()
        assert engine.step(nothing) == 0.0 and engine.last["grad_norm"] == 0.0
        assert differing(engine.state_dict(), before) == []


@pytest.mark.slow
def test_a_run_that_is_clipped_otherwise_from_here_on_is_warned_of_unless_its_bits_stay(tmp_path):
    def go_on(**options):
        with engine_of(tmp_path, clip_norm=0.5, **options) as engine:
            engine.step(batches(engine.steps_done, 2))

    go_on()
    go_on(clipping="speculate")
    assert differing(stored(tmp_path), plain_loop(Task(clip_norm=0.5)).states[1]) == []
    with pytest.warns(UserWarning, match="the mode of clipping was global and is per_block"):
        go_on(clipping="per_block")


# Bad input


@pytest.mark.parametrize(
    "options, says",
    [
        ({"clipping": "twice"}, "mode = 'twice' is not one of auto, defer, speculate, per_block"),
        ({"clipping": "none"}, "mode = 'none' is not one of auto, defer, speculate, per_block"),
        ({"clipping": "per_block", "clip_norm": None}, "no norm says to what"),
        ({"clipping": "speculate", "commit_every": 2}, r"commit_every=1 \(here 2\), or the mode 'defer'"),
        ({"clipping": "speculate", "schedule": "horizontal"}, "of the vertical schedule"),
    ],
)
def test_clipping_that_cannot_be_is_refused_before_anything_is_written(tmp_path, options, says):
    with pytest.raises(BadInput, match=says):
        engine_of(tmp_path / "run", **{"clip_norm": 1.0, **options})
    assert not (tmp_path / "run").exists()
