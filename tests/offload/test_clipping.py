"""Clipping: the bits of loops with ``clip_grad_norm_``, whether updates wait for the norm, guess it or need none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf, sqrt
from threading import Lock

import pytest
import torch
from torch import nn

import holdfast
from combined import one_in
from holdfast.errors import BadInput
from holdfast.offload.ops import KINDS, REDO
from holdfast.offload.setup import run_planning, step_planning
from holdfast.optim.host_optimizer import HostOptimizer, ParameterState
from holdfast.schedule.operations import GUESS
from plain_loops import (
    PLACEMENTS,
    STEPS,
    by_tokens,
    check,
    model_with_a_frozen_parameter,
    plain_loop,
    ragged,
)
from streams import Apart
from support.grouped import grouped
from support.held_operations import Held
from training import adamw, batches, differing, state_of, stored, warm_up

SOME = {1: 1.2, 3: 0.85}
"""By the number of micro-batches: a norm to clip to that some steps of the plain loop exceed and others do not."""


def engine_of(directory, **options):
    model = model_with_a_frozen_parameter()
    optimizer = adamw(model)
    options = {"dtype": "fp32", "scheduler": warm_up(optimizer), **options}
    return holdfast.offload(model, optimizer, directory, **grouped(**options))


def on_ssd(monkeypatch):
    """Gradients that wait do so on the SSD, as where host memory is short."""

    def choose(*args, **options):
        placement = entry_choose(*args, **options)
        return replace(placement, gradients=(False,) * len(placement.gradients))

    entry_choose = step_planning.choose
    monkeypatch.setattr(step_planning, "choose", choose)


# Updates that guess that nothing is clipped


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "num_micro_batches, placement, delayed_fraction", one_in(2, SOME, PLACEMENTS, [0.0, 0.5, 1.0])
)
def test_guesses_have_every_bit_of_a_loop_that_clips_some_steps(
    tmp_path, num_micro_batches, placement, delayed_fraction
):
    bound = SOME[num_micro_batches]
    norms = plain_loop(num_micro_batches, bound)[1]
    assert min(norms) < bound < max(norms)
    options = {"delayed_fraction": delayed_fraction, **PLACEMENTS[placement]}
    check(tmp_path, STEPS, num_micro_batches, bound, clipping="speculate", **options)


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("retain", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_guesses_that_are_always_wrong_or_always_right_have_every_bit(tmp_path, placement, retain):
    for bound in (0.1, inf):
        options = {"clipping": "speculate", "retain": retain, **PLACEMENTS[placement]}
        check(tmp_path / str(bound), 6, 2, bound, **options)


@pytest.mark.slow
def test_guesses_in_a_snake_and_with_dropout_have_every_bit(tmp_path):
    check(tmp_path / "dropout", STEPS, 3, SOME[3], dropout=0.2, clipping="speculate", **PLACEMENTS["mixed"])
    check(tmp_path / "snake", STEPS, 2, 0.9, order="snake", clipping="speculate", **PLACEMENTS["mixed"])


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_guesses_whose_gradients_wait_on_the_ssd_have_every_bit(tmp_path, monkeypatch, placement):
    on_ssd(monkeypatch)
    with engine_of(tmp_path / "run", clip_norm=1.0, clipping="speculate") as engine:
        assert any(op.key.kind == "store_grads" for op in engine._plan.operations)
    options = {"clipping": "speculate", "delayed_fraction": 0.34, **PLACEMENTS[placement]}
    check(tmp_path / "check", STEPS, 3, SOME[3], **options)


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
    check(tmp_path, 6, 2, 1.02, clipping="speculate", **PLACEMENTS["mixed"])
    assert most.steps == last.steps == again.keys() == set(range(6))


@pytest.mark.slow
def test_guesses_on_a_device_apart_have_every_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    check(tmp_path, STEPS, 3, SOME[3], clipping="speculate", delayed_fraction=0.5, **PLACEMENTS["mixed"])


def test_an_update_that_is_to_keep_its_gradient_works_on_a_copy():
    optimizer = HostOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0))
    for keep, left in ((True, 4.0), (False, 2.0)):
        state = ParameterState(torch.zeros(3), torch.full((3,), 4.0), {}, {"step": torch.ones(())}, None, 0)
        optimizer.update(state, optimizer.snapshot(), torch.tensor(0.5), keep_grad=keep)
        assert state.param.tolist() == [-2.0] * 3 and state.grad.tolist() == [left] * 3


# Steps whose norm is no number


class Spoiled:
    """Makes the gradients of ``module``'s output infinite in the steps of ``when``. The loss stays what it is."""

    def __init__(self, module, when):
        self.when, self.step = when, 0
        module.register_forward_hook(self.hook)

    def hook(self, module, args, output):
        if output.requires_grad and self.step in self.when:
            output.register_hook(lambda grad: grad * inf)


def skipping_loop(when, num_micro_batches, clip_norm):
    """Ordinary PyTorch that leaves out steps whose norm is not finite. The schedule goes on."""
    model = model_with_a_frozen_parameter()
    optimizer, spoiled, states = adamw(model, fused=True), Spoiled(model.head, when), []
    scheduler = warm_up(optimizer)
    for spoiled.step in range(8):
        for batch in batches(spoiled.step, num_micro_batches):
            (model(**batch) / num_micro_batches).backward()
        if nn.utils.clip_grad_norm_(model.parameters(), clip_norm).isfinite():
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        states.append(state_of(model, optimizer))
    return states


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("clip_norm", [0.9, inf])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "clipping, delayed_fraction", [("defer", 0.0), ("speculate", 0.0), ("speculate", 0.5)]
)
def test_a_step_whose_norm_is_not_finite_is_skipped_and_undone(
    tmp_path, clipping, delayed_fraction, placement, clip_norm
):
    when = {1, 3, 4, 6}
    states = skipping_loop(when, 2, clip_norm)
    options = {"clipping": clipping, "delayed_fraction": delayed_fraction, **PLACEMENTS[placement]}
    with engine_of(tmp_path, clip_norm=clip_norm, **options) as engine:
        spoiled = Spoiled(engine._run.model.head, when)
        for spoiled.step in range(8):
            engine.step(batches(spoiled.step, 2))
            skipped = engine.last["skipped"]
            assert (skipped is not None) is (spoiled.step in when), skipped
            held = {f"{name}/param": value for name, value in engine.state_dict().items()}
            assert differing(held, {name: states[spoiled.step][name] for name in held}) == []
        assert engine.skipped_steps == len(when)
    assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("clipping", ["defer", "speculate", "per_block"])
def test_a_loss_that_is_no_number_skips_the_whole_step(tmp_path, clipping):
    with engine_of(tmp_path, clip_norm=0.5, clipping=clipping, **PLACEMENTS["mixed"]) as engine:
        engine.step(batches(0, 2))
        before = engine.state_dict()
        spoiled = batches(1, 2)
        spoiled[1]["targets"].fill_(-100)
        engine.step(spoiled)
        assert engine.last["skipped"] == "the loss of micro-batch 1 is nan"
        assert differing(engine.state_dict(), before) == []
        engine.step(batches(2, 2))
        assert engine.last["skipped"] is None and differing(engine.state_dict(), before) != []


# Losses by tokens


def tokens_loop(clip):
    """Ordinary PyTorch, in which a target counts the same in whatever micro-batch it is."""
    model = model_with_a_frozen_parameter()
    optimizer, states = adamw(model, fused=True), []
    scheduler = warm_up(optimizer)
    for step in range(8):
        made = ragged(step, 4)
        for batch, share in zip(made, by_tokens(made), strict=True):
            if share:  # without targets the loss is a mean of nothing
                (model(**batch) * share).backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        states.append(state_of(model, optimizer))
    return states


def clip_parts(model):
    parts = parts_of(model)
    total = sum(p.numel() for part in parts for p in part)
    for part in parts:
        nn.utils.clip_grad_norm_(part, 0.8 * sqrt(sum(p.numel() for p in part) / total))


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("clipping", ["defer", "speculate", "per_block"])
def test_a_micro_batch_without_targets_counts_nothing_where_tokens_are_counted(tmp_path, clipping):
    every = clip_parts if clipping == "per_block" else lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.8)
    states = tokens_loop(every)
    options = {"clipping": clipping, "clip_norm": 0.8, "normalize": "tokens", **PLACEMENTS["mixed"]}
    with engine_of(tmp_path, **options) as engine:
        for step in range(8):
            engine.step(ragged(step, 4))
            assert engine.last["skipped"] is None
    assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
def test_a_step_without_any_target_changes_no_weight(tmp_path):
    nothing = [batch | {"targets": torch.full_like(batch["targets"], -100)} for batch in batches(1, 2)]
    with engine_of(tmp_path, clip_norm=0.8, normalize="tokens") as engine:
        engine.step(ragged(0, 2))
        before = engine.state_dict()
        assert engine.step(nothing) == 0.0 and engine.last["grad_norm"] == 0.0
        assert differing(engine.state_dict(), before) == []


# Each block by itself


def parts_of(model):
    """The trained parameters of each block, and of what is no block."""
    parts = [list(block.parameters()) for block in model.blocks]
    inside = {id(p) for part in parts for p in part}
    parts.append([p for p in model.parameters() if id(p) not in inside])
    return [[p for p in part if p.requires_grad] for part in parts]


@cache
def loop_by_block(num_micro_batches, clip_norm, when=frozenset()):
    """Ordinary PyTorch that clips each block by itself, and leaves out what has no finite norm."""
    model = model_with_a_frozen_parameter()
    optimizer = adamw(model, fused=True)
    scheduler, spoiled = warm_up(optimizer), Spoiled(model.blocks[2].mlp.down, when)
    parts, losses, norms, states = parts_of(model), [], [], []
    total = sum(p.numel() for part in parts for p in part)
    with holdfast.keyed_rng(model) as keys:
        for spoiled.step in range(STEPS):
            made = []
            for m, batch in enumerate(batches(spoiled.step, num_micro_batches)):
                keys.at(spoiled.step, m)
                made.append(model(**batch))
                (made[-1] / num_micro_batches).backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            for part in parts:
                bound = clip_norm * sqrt(sum(p.numel() for p in part) / total)
                if not nn.utils.clip_grad_norm_(part, bound).isfinite():
                    for p in part:
                        p.grad = None
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(sum(loss.item() for loss in made) / num_micro_batches)
            states.append(state_of(model, optimizer))
    return losses, norms, states


def check_by_block(directory, num_micro_batches, clip_norm, when=frozenset(), **options):
    losses, norms, states = loop_by_block(num_micro_batches, clip_norm, when)
    left_out = []
    with engine_of(directory, clip_norm=clip_norm, clipping="per_block", **options) as engine:
        spoiled = Spoiled(engine._run.model.blocks[2].mlp.down, when)
        for spoiled.step in range(STEPS):
            assert engine.step(batches(spoiled.step, num_micro_batches)) == losses[spoiled.step]
            norm = torch.tensor(engine.last["grad_norm"])
            assert torch.equal(norm, norms[spoiled.step]) or not norm.isfinite()
            left_out.append(engine.last["left_out"])
    assert differing(stored(directory), states[-1]) == []
    return left_out


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "schedule, placement, delayed_fraction, clip_norm",
    one_in(3, ["vertical", "horizontal"], PLACEMENTS, [0.0, 0.5], [0.5, 1.5]),
)
def test_blocks_clipped_by_themselves_have_every_bit_of_a_loop_that_clips_them_so(
    tmp_path, schedule, placement, delayed_fraction, clip_norm
):
    options = {"schedule": schedule, "delayed_fraction": delayed_fraction, **PLACEMENTS[placement]}
    assert set(check_by_block(tmp_path, 3, clip_norm, **options)) == {None}


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_block_without_a_finite_norm_is_left_out_and_the_others_are_not(tmp_path, placement):
    found = check_by_block(tmp_path, 2, 0.5, frozenset({1, 5}), delayed_fraction=0.5, **PLACEMENTS[placement])
    spoiled = ["blocks.0", "blocks.1", "blocks.2", "resident"]
    assert found == [spoiled if step in (1, 5) else None for step in range(STEPS)]


def test_the_bounds_of_all_parts_make_up_the_clip_norm():
    """So the norm over all that is left is never above it."""
    parts = parts_of(model_with_a_frozen_parameter())
    total = sum(p.numel() for part in parts for p in part)
    bounds = torch.tensor([1.5 * sqrt(sum(p.numel() for p in part) / total) for part in parts])
    torch.testing.assert_close(bounds.norm(), torch.tensor(1.5))


@pytest.mark.slow
def test_a_run_that_is_clipped_otherwise_from_here_on_is_warned_of_unless_its_bits_stay(tmp_path):
    def go_on(**options):
        with engine_of(tmp_path, clip_norm=0.5, **options) as engine:
            engine.step(batches(engine.steps_done, 2))

    go_on()
    go_on(clipping="speculate")
    assert differing(stored(tmp_path), plain_loop(2, 0.5)[2][1]) == []
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
