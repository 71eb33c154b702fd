"""Delayed updates and the snake order: nobody sees a weight too early, and nothing is lost."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import holdfast
from holdfast.errors import BadInput
from plain_loops import STEPS, Task, model_with_a_frozen_parameter, plain_loop
from support.grouped import grouped
from support.held_operations import Held
from training import adamw, batches, differing, state_of, stored, warm_up


def test_from_three_micro_batches_on_a_snake_has_other_bits_of_sums():
    """As their first moments show in the first step: later ones make much of little."""
    for count, same in ((1, True), (2, True), (3, False)):
        snake, plain = (plain_loop(Task(count=count, snake=turned)).states for turned in (True, False))
        assert (differing(snake[-1], plain[-1]) == []) is same
        moments = [name for name in plain[0] if name.endswith("exp_avg")]
        assert len(moments) > 6
        for name in moments:
            largest = plain[0][name].abs().max()
            assert (snake[0][name] - plain[0][name]).abs().max() <= 4 * torch.finfo().eps * largest


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
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("delayed_fraction", [0.5, 1.0])
def test_whatever_reads_weights_reads_those_of_the_step_that_was_returned(
    tmp_path, monkeypatch, delayed_fraction
):
    """Each reader comes first after a step, while every delayed update of that step has yet to begin."""
    states = plain_loop(Task()).states
    twin = model_with_a_frozen_parameter().eval()
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
    states = plain_loop(Task()).states
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
    twin = model_with_a_frozen_parameter().eval()
    twin.load_state_dict({name: states[0][f"{name}/param"] for name in twin.state_dict()})
    with torch.no_grad():
        assert found == sum(twin(**batch).item() for batch in batches(7, 2)) / 2
    parameters = {name: value for name, value in states[0].items() if name.endswith("/param")}
    assert differing(held, parameters) == []


# Resuming


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_under_another_fraction(tmp_path):
    losses, states = plain_loop(Task(count=3))[0], plain_loop(Task(count=3)).states
    done = 0
    for fraction, until in ((0.0, 1), (1.0, 3), (0.5, STEPS)):
        with delayed_engine(tmp_path, fraction) as engine:
            assert engine.steps_done == done
            for step in range(done, until):
                assert engine.step(batches(step, 3)) == losses[step]
        done = until
        assert differing(stored(tmp_path), states[until - 1]) == []


@pytest.mark.slow
def test_a_commit_holds_every_update_of_its_step(tmp_path, monkeypatch):
    """Each commit that is published while the next step runs is the state of its own step, delayed or not."""
    states = plain_loop(Task()).states
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
    states = plain_loop(Task()).states
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
