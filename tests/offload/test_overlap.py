"""Delayed updates and the snake order: the bits of a loop that knows of neither, and nobody sees a weight too early."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch

import holdfast
from combined import one_in
from holdfast.errors import BadInput
from holdfast.offload.setup import run_planning
from plain_loops import PLACEMENTS, STEPS, check, model_with_a_frozen_parameter, plain_loop
from streams import Apart
from support.grouped import grouped
from support.held_operations import Held
from training import adamw, batches, decoder, differing, state_of, stored, warm_up

FRACTIONS = [0.25, 0.5, 1.0]


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "num_micro_batches, placement, delayed_fraction, clip_norm",
    one_in(4, [1, 2, 3, 5], PLACEMENTS, FRACTIONS, [None, 0.5]),
)
def test_delayed_steps_have_every_bit_of_a_plain_loop(
    tmp_path, num_micro_batches, placement, delayed_fraction, clip_norm
):
    options = {"delayed_fraction": delayed_fraction, **PLACEMENTS[placement]}
    check(tmp_path, STEPS, num_micro_batches, clip_norm, **options)


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("delayed_fraction", FRACTIONS)
def test_dropout_draws_the_same_when_updates_are_delayed(tmp_path, delayed_fraction):
    check(tmp_path, STEPS, 3, None, dropout=0.2, delayed_fraction=delayed_fraction, **PLACEMENTS["mixed"])


# The snake against its own reference


def turned(name: str, last: int, count: int) -> list[int]:
    """The order in which a snake adds the gradients of parameter ``name``."""
    if name.startswith("blocks."):
        block = int(name.split(".")[1])
    else:  # the prologue goes with block 0, the epilogue with the last block
        block = 0 if name.startswith("embed") else last
    return list(range(count))[:: -1 if block % 2 else 1]


@cache
def snake_loop(num_micro_batches, clip_norm, blocks, dropout=0.0):
    """Ordinary PyTorch, but for the order in which each parameter's gradients are added up."""
    model = decoder(blocks=blocks, dropout=dropout)
    optimizer, losses, states = adamw(model, fused=True), [], []
    scheduler = warm_up(optimizer)
    with holdfast.keyed_rng(model) as keys:
        for step in range(STEPS):
            made, total = [], 0.0
            for m, batch in enumerate(batches(step, num_micro_batches)):
                keys.at(step, m)
                loss = model(**batch)
                (loss / num_micro_batches).backward()
                made.append({name: p.grad for name, p in model.named_parameters()})
                optimizer.zero_grad()
                total += loss.item()
            for name, p in model.named_parameters():
                for m in turned(name, blocks - 1, num_micro_batches):
                    p.grad = made[m][name].clone() if p.grad is None else p.grad.add_(made[m][name])
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total / num_micro_batches)
            states.append(state_of(model, optimizer))
    return losses, states


def check_snake(directory, num_micro_batches, clip_norm, blocks=6, dropout=0.0, **options):
    losses, states = snake_loop(num_micro_batches, clip_norm, blocks, dropout)
    model = decoder(blocks=blocks, dropout=dropout)
    optimizer = adamw(model)
    with holdfast.offload(
        model,
        optimizer,
        directory,
        **grouped(scheduler=warm_up(optimizer), dtype="fp32", clip_norm=clip_norm, order="snake", **options),
    ) as engine:
        assert [engine.step(batches(step, num_micro_batches)) for step in range(STEPS)] == losses
    assert differing(stored(directory), states[-1]) == []


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "num_micro_batches, placement, clip_norm", one_in(2, [1, 2, 3, 5], PLACEMENTS, [None, 0.5])
)
def test_a_snake_has_every_bit_of_a_loop_that_adds_up_odd_blocks_the_other_way(
    tmp_path, num_micro_batches, placement, clip_norm
):
    check_snake(tmp_path, num_micro_batches, clip_norm, **PLACEMENTS[placement])


@pytest.mark.slow
@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("delayed_fraction", FRACTIONS)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_snake_of_any_length_may_be_delayed(tmp_path, blocks, delayed_fraction):
    options = {"delayed_fraction": delayed_fraction, **PLACEMENTS["mixed"]}
    check_snake(tmp_path, 3, None, blocks=blocks, dropout=0.2, **options)


@pytest.mark.slow
def test_up_to_two_micro_batches_a_snake_has_the_bits_of_the_plain_order_and_then_other_ones():
    """Other bits of sums, as their first moments show in the first step: later ones make much of little."""
    for count, same in ((1, True), (2, True), (3, False)):
        snake, plain = snake_loop(count, None, 6)[1], straight(count)
        assert (differing(snake[-1], plain[-1]) == []) is same
        moments = [name for name in plain[0] if name.endswith("exp_avg")]
        assert len(moments) > 6
        for name in moments:
            largest = plain[0][name].abs().max()
            assert (snake[0][name] - plain[0][name]).abs().max() <= 4 * torch.finfo().eps * largest


def straight(count):
    model = decoder()
    optimizer = adamw(model, fused=True)
    scheduler, states = warm_up(optimizer), []
    for step in range(STEPS):
        for batch in batches(step, count):
            (model(**batch) / count).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        states.append(state_of(model, optimizer))
    return states


# Nobody sees what a delayed update has yet to do


def delayed_engine(directory, delayed_fraction=0.5, **options):
    model = model_with_a_frozen_parameter()
    optimizer = adamw(model)
    return holdfast.offload(
        model,
        optimizer,
        directory,
        **grouped(scheduler=warm_up(optimizer), dtype="fp32", delayed_fraction=delayed_fraction, **options),
    )


@pytest.mark.slow
@pytest.mark.parametrize("delayed_fraction", [0.5, 1.0])
def test_whatever_reads_weights_reads_those_of_the_step_that_was_returned(
    tmp_path, monkeypatch, delayed_fraction
):
    """Each reader comes first after a step, while every delayed update of that step has yet to begin."""
    _, _, states = plain_loop(2, None)
    twin = decoder().eval()
    prompt = batches(9, 1)[0]["tokens"][:1]

    def evaluates(engine, state):
        with torch.no_grad():
            expected = [twin(**batch).item() for batch in batches(7, 2)]
        assert engine.evaluate(batches(7, 2)) == sum(expected) / 2

    def gives_its_state(engine, state):
        held = {f"{name}/param": value for name, value in engine.state_dict().items()}
        assert differing(held, {name: state[name] for name in held}) == []

    def generates(engine, state):
        likeliest = engine.generate(prompt, 1, temperature=0.0)[0, -1]
        with torch.no_grad():
            assert likeliest == twin(prompt)[0, -1].argmax()

    readers, updates = [evaluates, gives_its_state, generates], Held(monkeypatch, "update")
    with delayed_engine(tmp_path, delayed_fraction) as engine, updates:
        for step in range(4):
            engine.step(batches(step, 2))
            assert engine.durable_step == step
            twin.load_state_dict({name: states[step][f"{name}/param"] for name in twin.state_dict()})
            first, *others = readers[step % 3 :] + readers[: step % 3]
            with updates.released_by_who_waits(engine):
                first(engine, states[step])
            for reads in others:
                reads(engine, states[step])
    assert updates.steps == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_step_that_was_returned_keeps_its_own_hyper_parameters(tmp_path, monkeypatch):
    """A learning rate changed right after a step is that of the next one, also for what is still to be updated."""
    model = model_with_a_frozen_parameter()
    optimizer = adamw(model, fused=True)
    rates = [1e-2, 3e-3, 5e-2, 1e-3]
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for batch in batches(step, 2):
            (model(**batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = model_with_a_frozen_parameter()
    own, updates = adamw(trained), Held(monkeypatch, "update")
    engine = holdfast.offload(trained, own, tmp_path, **grouped(dtype="fp32", delayed_fraction=1.0))
    with engine, updates:
        for step, rate in enumerate(rates):
            for group in own.param_groups:
                group["lr"] = rate
            engine.step(batches(step, 2))
            for group in own.param_groups:
                group["lr"] = 1e3
            updates.release(step)
    assert updates.steps == {0, 1, 2, 3}
    assert differing(stored(tmp_path), state_of(model, optimizer)) == []


@pytest.mark.slow
def test_a_skipped_step_skips_its_delayed_updates_and_no_other(tmp_path, monkeypatch):
    _, _, states = plain_loop(2, None)
    updates = Held(monkeypatch, "update")
    with delayed_engine(tmp_path, 1.0) as engine, updates:
        engine.step(batches(0, 2))
        handle = engine._run.model.head.register_forward_hook(lambda *hooked: hooked[2] * float("nan"))
        with updates.released_by_who_waits(engine):
            engine.step(batches(1, 2))
        handle.remove()
        with updates.released_by_who_waits(engine):
            held = {f"{name}/param": value for name, value in engine.state_dict().items()}
        assert updates.steps == {0, 1}
        found = engine.evaluate(batches(7, 2))
    twin = decoder().eval()
    twin.load_state_dict({name: states[0][f"{name}/param"] for name in twin.state_dict()})
    with torch.no_grad():
        assert found == sum(twin(**batch).item() for batch in batches(7, 2)) / 2
    parameters = {name: value for name, value in states[0].items() if name.endswith("/param")}
    assert differing(held, parameters) == []


# Resuming


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_under_another_fraction(tmp_path):
    losses, _, states = plain_loop(3, None)
    done = 0
    for fraction, until in ((0.0, 2), (1.0, 4), (0.25, 6), (0.5, STEPS)):
        with delayed_engine(tmp_path, fraction) as engine:
            assert engine.steps_done == done
            for step in range(done, until):
                assert engine.step(batches(step, 3)) == losses[step]
        done = until
        assert differing(stored(tmp_path), states[until - 1]) == []


@pytest.mark.slow
def test_a_commit_holds_every_update_of_its_step(tmp_path, monkeypatch):
    """Each commit that is published while the next step runs is the state of its own step, delayed or not."""
    _, _, states = plain_loop(2, None)
    updates = Held(monkeypatch, "update")
    with delayed_engine(tmp_path, 0.5) as engine, updates:
        seen = set()
        publish = engine._run.store.publish

        def look(step, *rest, **options):
            publish(step, *rest, **options)
            assert differing(stored(tmp_path), states[step - 1]) == []
            seen.add(step)

        engine._run.store.publish = look
        for step in range(5):
            with updates.released_by_who_waits(engine) if step else nullcontext():
                engine.step(batches(step, 2))
            assert engine.durable_step == step
    assert seen == {1, 2, 3, 4, 5}
    assert updates.steps == {0, 1, 2, 3, 4}


@pytest.mark.slow
def test_a_save_between_commits_has_the_delayed_updates_too(tmp_path, monkeypatch):
    _, _, states = plain_loop(2, None)
    updates = Held(monkeypatch, "update")
    with delayed_engine(tmp_path, 1.0, commit_every=0) as engine, updates:
        for step in range(3):
            with updates.released_by_who_waits(engine) if step else nullcontext():
                engine.step(batches(step, 2))
        with updates.released_by_who_waits(engine):
            engine.save()
        assert updates.steps == {0, 1, 2}
        assert differing(stored(tmp_path), states[2]) == []


def test_a_run_that_goes_on_in_another_order_is_warned_of(tmp_path):
    with delayed_engine(tmp_path) as engine:
        engine.step(batches(0, 2))
    with pytest.warns(UserWarning, match="order was plain and is snake"):
        delayed_engine(tmp_path, order="snake").close()


# Bad input


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan"), "half"])
def test_a_fraction_that_is_none_is_refused(tmp_path, fraction):
    with pytest.raises(BadInput, match=r"delayed_fraction = .* must lie between 0 and 1"):
        delayed_engine(tmp_path / "run", fraction)
    assert not (tmp_path / "run").exists()


def test_a_snake_is_of_the_vertical_schedule(tmp_path):
    with pytest.raises(BadInput, match="'snake' is of the vertical schedule"):
        delayed_engine(tmp_path / "run", 0.0, order="snake", schedule="horizontal")
    assert not (tmp_path / "run").exists()


# Where delayed gradients wait


@pytest.mark.slow
@pytest.mark.parametrize("activations_on_host", [1.0, 0.0])
def test_memory_that_block_inputs_have_lent_goes_back_to_the_system(tmp_path, activations_on_host):
    """The next forward pass needs it for inputs, which are not the pool's. What is not lent is kept for the next
    step."""
    options = {
        "activations_on_host": activations_on_host,
        "sample": batches(0, 1, rows=8)[0],
        "micro_batches": 2,
    }
    with delayed_engine(tmp_path, 1.0, **options) as engine:
        for step in range(2):
            engine.step(batches(step, 2, rows=8))
        engine.wait()
        idle = [b.kind for held in engine._run.residency.pool._idle.values() for b in held]
        assert ("gradients" in idle) is not bool(activations_on_host)


# A device that is not host memory


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_the_same_bits_come_from_a_device_apart(tmp_path, monkeypatch, num_micro_batches, placement):
    monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    options = {"delayed_fraction": 0.5, **PLACEMENTS[placement]}
    check(tmp_path / "plain", 4, num_micro_batches, None, **options)
    check_snake(tmp_path / "snake", num_micro_batches, None, **options)
