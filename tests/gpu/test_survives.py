"""A Checkpointer of training on a CUDA device: records, resuming, and no waiting. Run with `-m gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu.training import OPTIMIZERS, Script
from holdfast.checkpoint.compression.lossy import Int8, TopK
from holdfast.events import read_events
from holdfast.store.commit.retention import Keep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

STEPS = 9


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def train(root, script, **options):
    """The state and the loss after each step."""
    states, losses = {}, {}
    with script.checkpointer(root, base_every=4, keep=Keep(9), **options) as checkpointer:
        checkpointer.resume()
        for i in range(STEPS):
            losses[i + 1] = script.step(i)
            script.optimizer.zero_grad(set_to_none=False)  # overwrites what may be on its way
            checkpointer.step()
            states[i + 1] = script.state()
    return states, losses


SCRIPTS = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "unscaled by the optimizer": {"scaled": True},
    "unscaled and clipped by the script": {"scaled": True, "unscale": True},
    "foreach and scaled": {"optimizer": "foreach AdamW", "scaled": True, "unscale": True},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_step_comes_back_bit_for_bit_and_training_goes_on_as_it_did(tmp_path, name):
    states, losses = train(tmp_path, Script(**SCRIPTS[name]))
    for step in (8, 6, 5, 3, 1):
        again = Script(**SCRIPTS[name])
        with again.checkpointer(tmp_path, keep=Keep(9)) as checkpointer:
            assert checkpointer.resume(step=step) == step
            assert same(again.state(), states[step]), step
            for i in range(step, STEPS):
                assert torch.equal(again.step(i), losses[i + 1]), (step, i)
                again.optimizer.zero_grad()
                checkpointer.step()
            assert same(again.state(), states[STEPS]), step


@pytest.mark.parametrize("codec", [TopK(0.1), Int8()], ids=str)
def test_compressed_records_are_expanded_where_they_were_made(tmp_path, codec):
    states, _ = train(tmp_path, Script(), codec=codec)
    for step in (7, 5, 2):
        again = Script()
        with (
            again.checkpointer(tmp_path, keep=Keep(9), codec=codec) as checkpointer,
            pytest.warns(UserWarning, match="state-exact"),
        ):
            assert checkpointer.resume(step=step) == step
            assert same(again.state(), states[step]), step


@pytest.mark.parametrize("replica", [False, True])
def test_training_waits_for_nothing_that_is_on_its_way(tmp_path, replica):
    """torch raises at each call that would wait for the device."""
    script = Script()
    with script.checkpointer(tmp_path, replica=replica, base_every=1000) as checkpointer:
        checkpointer.resume()
        for i in range(6):
            script.step(i)
            checkpointer.step()
        checkpointer.wait()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            script.optimizer.step()
            checkpointer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert checkpointer.steps_done == 7
        if replica:
            checkpointer._backend.drain()
            assert checkpointer.replica_step == 7
    assert not drifts(tmp_path)


def run(root, steps, *kill_at, replica=False):
    """What the script said, until its end or its death."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    done = subprocess.run(
        [sys.executable, str(tests / "gpu" / "training.py"), str(root), str(steps), *map(str, kill_at)],
        env={**os.environ, "PYTHONPATH": path, "REPLICA": "1" if replica else ""},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == (-9 if kill_at else 0), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kill_at", [5, 8])
def test_a_killed_script_goes_on_as_if_it_had_not_been(tmp_path, kill_at):
    whole = run(tmp_path / "whole", 12)
    run(tmp_path / "cut", 12, kill_at)
    assert run(tmp_path / "cut", 12) == whole[kill_at:]


# With a replica, whose updates this device does too


def drifts(root):
    return [event for event in read_events(root / "events.jsonl") if event["event"] == "drift"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_replica_has_the_bits_of_the_device_after_every_step(tmp_path, name):
    """Compared in full by digest at each base, by fingerprint after each step; read back from the disk."""
    states, script = {}, Script(**SCRIPTS[name])
    with script.checkpointer(tmp_path, replica=True, keep=Keep(99)) as checkpointer:
        checkpointer.resume()
        for i in range(STEPS):
            script.step(i)
            script.optimizer.zero_grad(set_to_none=False)  # overwrites what may be on its way
            checkpointer.step()
            if i % 3 != 1:
                checkpointer.save()
            states[i + 1] = script.state()
    assert not drifts(tmp_path)
    for step in (9, 7, 6, 4, 3, 1):
        again = Script(**SCRIPTS[name])
        with again.checkpointer(tmp_path, keep=Keep(99)) as checkpointer:
            assert checkpointer.resume(step=step) == step
            assert same(again.state(), states[step]), step


@pytest.mark.parametrize("kill_at", [5, 8])
def test_a_script_that_was_killed_goes_on_from_its_replica(tmp_path, kill_at):
    whole = run(tmp_path / "whole", 12)
    run(tmp_path / "cut", 12, kill_at, replica=True)
    assert run(tmp_path / "cut", 12, replica=True) == whole[kill_at:]
    resumed = [
        event for event in read_events(tmp_path / "cut" / "events.jsonl") if event["event"] == "resumed"
    ]
    assert [event["step"] for event in resumed] == [kill_at] and not drifts(tmp_path / "cut")
