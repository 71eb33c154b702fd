"""Copies in memory, SIGTERM, every=, going back and the guard of training on a device.

Run with ``-m gpu``; where there is no CUDA device each case runs on the CPU.
"""

from __future__ import annotations

import json

import pytest
import torch

from gpu.processes import TESTS, ended, events, largest_differences, started
from gpu.script_kinds import Setup, groups
from gpu.test_survives import SCRIPTS
from gpu.training import DEVICE, Script
from holdfast.store.commit.retention import Keep
from support.switching import switch_often

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),  # some start a process after the other, each of which makes a context
]


LAST = 22


def run(root, *words, code=0, **environment):
    """What the script said, until its end or its death."""
    said = ended(started(TESTS / "gpu" / "training.py", root, *words, **environment), code)
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the script says that nothing disturbs, by step; that it is recorded changes none of its numbers."""
    return run(tmp_path_factory.mktemp("whole") / "run", LAST)


def test_a_copy_in_memory_survives_a_kill(tmp_path, whole):
    """The disk has step 10 and memory step 18, when the script is killed after step 19."""
    options = {"COPIES": "1", "OPTIONS": json.dumps({"every": "auto"})}
    run(tmp_path, LAST, 19, code=-9, **options)
    assert run(tmp_path, LAST, **options) == whole[18:]
    [resumed] = events(tmp_path, "resumed")
    assert (resumed["source"], resumed["step"]) == ("memory", 18), resumed
    assert resumed["durable_step"] < 18, resumed


@pytest.mark.parametrize("options", [{"every": 4}, {"grace_seconds": 60.0}], ids=str)
def test_a_sigterm_leaves_everything_durable(tmp_path, whole, options):
    given = {"OPTIONS": json.dumps(options)}
    assert run(tmp_path, LAST, code=143, SIGTERM_AT="6", **given) == whole[:6]
    assert run(tmp_path, LAST, **given) == whole[6:]


def test_every_third_step_comes_back(tmp_path):
    """Without records; each base is of one step."""
    states, losses = {}, {}
    script = Script()
    with script.checkpointer(tmp_path, every=3, keep=Keep(99)) as checkpointer:
        checkpointer.resume()
        for i in range(9):
            losses[i + 1] = script.step(i)
            script.optimizer.zero_grad(set_to_none=False)
            checkpointer.step()
            checkpointer._backend.drain()  # a base that is being written puts off the next one
            states[i + 1] = script.state()
    for step in (9, 6, 3):
        again = Script()
        with again.checkpointer(tmp_path, every=3, keep=Keep(99)) as checkpointer:
            assert checkpointer.resume(step=step) == step
            assert largest_differences(again.state(), states[step]) == {}, step
            for i in range(step, 9):
                assert torch.equal(again.step(i), losses[i + 1]), (step, i)
                again.optimizer.zero_grad()
                checkpointer.step()


def test_auto_chooses_and_comes_back(tmp_path, monkeypatch):
    """It measures records, bases and copies of the device in rounds of some steps, and changes its choice."""
    switch_often(monkeypatch.setattr)
    script, states = Script(), {}
    checkpointer = script.checkpointer(tmp_path, every="auto", keep=Keep(99))
    checkpointer.resume()
    for i in range(30):
        script.step(i)
        script.optimizer.zero_grad(set_to_none=False)
        checkpointer.step()
        checkpointer._backend.drain()
        states[i + 1] = script.state()
    durable = checkpointer.durable_step
    checkpointer.close(save=False)
    assert durable > 20 and len(events(tmp_path, "every")) >= 2, (durable, events(tmp_path, "every"))
    again = Script()
    with again.checkpointer(tmp_path, every="auto", keep=Keep(99)) as checkpointer:
        reached = checkpointer.resume()
        assert reached >= durable and largest_differences(again.state(), states[reached]) == {}, reached


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_rollback_and_a_save_have_the_bits_of_training(tmp_path, name):
    script, states = Script(**SCRIPTS[name]), {}
    with script.checkpointer(tmp_path, base_every=4, keep=Keep(99)) as checkpointer:
        checkpointer.resume()
        i = 0
        for until, back in ((7, 5), (8, 3), (9, 9)):
            while i < until:
                script.step(i)
                script.optimizer.zero_grad(set_to_none=False)
                checkpointer.step()
                i += 1
                now = script.state()
                assert largest_differences(states.setdefault(i, now), now) == {}, (until, i)
            checkpointer.save()
            if back < until:
                assert checkpointer.rollback(back) == back
                i = back
                assert largest_differences(script.state(), states[back]) == {}, back
    again = Script(**SCRIPTS[name])
    with again.checkpointer(tmp_path, keep=Keep(99)) as checkpointer:
        assert checkpointer.resume() == 9 and largest_differences(again.state(), states[9]) == {}


@pytest.mark.parametrize("copy_every", [None, 2])
def test_a_guard_goes_back_with_the_bits_of_training(tmp_path, copy_every):
    script, states = Setup(groups), {}
    with script.checkpointer(tmp_path) as checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(copy_every=copy_every)
        for i in range(7):
            loss = script.train(script.batch_of(i))
            checkpointer.step()
            states[i + 1] = script.state()
            assert not guard.check(loss), (i, float(loss))
        assert guard.check(torch.full((), float("nan"), device=DEVICE))
        reached = checkpointer.steps_done
        assert reached == 6, reached
        assert largest_differences(script.state(), states[reached]) == {}
        again = script.train(script.batch_of(6))
        checkpointer.step()
        assert largest_differences(script.state(), states[7]) == {}, float(again)
