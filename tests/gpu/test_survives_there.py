"""What came to the Checkpointer since it first ran on a device: notes of arithmetic, copies in memory, going back, the
commands, every kind of optimizer, ranks and standbys.

Run with ``-m gpu``. Where there is no CUDA device each case runs on the CPU, so that the case itself is known to be
right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import torch_optimizers
from checkpoint.test_arithmetic import other_processor
from gpu.test_survives import SCRIPTS
from gpu.training import DEVICE, Script
from holdfast.checkpoint import arithmetic
from holdfast.checkpointer import Checkpointer
from holdfast.errors import OtherArithmetic
from holdfast.events import read_events
from holdfast.store.commit.retention import Keep
from test_checkpointer_torch_optimizers import changed_by_a_kill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
]

HERE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]), "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TEST_DEVICE": DEVICE,
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.use_deterministic_algorithms(False)


def started(*words, **environment):
    """A fresh interpreter: a fork of a process that has used the device could not use it."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process, code=0):
    """What the process printed. It ends with ``code``."""
    out, err = process.communicate(timeout=110)
    assert process.returncode == code, (
        f"ended with {process.returncode}, not {code}:\n{out[-2000:]}\n{err[-6000:]}"
    )
    return out


def events(root, name):
    return [event for event in read_events(root / "events.jsonl") if event["event"] == name]


def differing(one, other):
    """The largest differences of two states, by name of the tensor; empty if they are the same bits."""
    assert one.keys() == other.keys(), (sorted(one), sorted(other))
    apart = {
        name: (one[name].cpu(), other[name].cpu())
        for name in one
        if not torch.equal(one[name].cpu(), other[name].cpu())
    }
    return {name: float((a.double() - b.double()).abs().max()) for name, (a, b) in apart.items()}


# The arithmetic that snapshots note


DIGESTS = """
import json, time, torch
from holdfast.checkpoint import arithmetic
device = torch.device({device!r})
torch.ones(1, device=device).sum().item()
began = time.perf_counter()
found = arithmetic.arithmetic_of(device)
print(json.dumps([found, time.perf_counter() - began]))
"""


def test_digests_are_those_of_every_process(tmp_path):
    """The seconds that taking them costs a process are in ``measured``, printed where it fails or with ``-s``."""
    processes = [started("-c", DIGESTS.format(device=str(HERE))) for _ in range(3)]
    measured = [json.loads(ended(process)) for process in processes]
    print(f"digests of {HERE} took {[round(1000 * seconds, 1) for _, seconds in measured]} ms")
    here = arithmetic.arithmetic_of(HERE)
    assert "none" not in here.values(), f"{HERE} could not compute all groups: {here}"
    assert [found for found, _ in measured] == [here] * 3, (measured, here)
    assert all(seconds < 5 for _, seconds in measured), measured


def test_digests_are_those_whatever_runs_beside():
    """Under a default device and stream of the script, with its settings of matrix products."""
    plain = arithmetic.arithmetic_of(HERE)
    found = {}
    for way in ("default device", "precision of products", "deterministic", "autocast", "default dtype"):
        arithmetic.arithmetic_of.cache_clear()
        with setting(way):
            found[way] = arithmetic.arithmetic_of(HERE)
    arithmetic.arithmetic_of.cache_clear()
    other = {way: {name for name in plain if plain[name] != each[name]} for way, each in found.items()}
    assert not any(other.values()), other


@contextmanager
def setting(way):
    """One of the settings of a script that may not change a digest."""
    try:
        if way == "default device":
            torch.set_default_device(DEVICE)
        elif way == "precision of products":
            torch.set_float32_matmul_precision("medium")
        elif way == "deterministic":
            torch.use_deterministic_algorithms(True)
        elif way == "default dtype":
            torch.set_default_dtype(torch.float64)
        with torch.autocast(DEVICE, torch.bfloat16) if way == "autocast" else nullcontext():
            yield
    finally:
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def elsewhere(function, *arguments):
    """What a function returns on the CPU, which is another device; where it is none, on another kind of processor."""
    with nullcontext() if DEVICE == "cuda" else other_processor():
        return function(*arguments)


def small(optimizer, device):
    """A script whose gradients are numbers of its own, so that two devices train alike up to an update."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 9)).to(device)
    return model, OPTIMIZERS[optimizer](list(model.parameters()))


OPTIMIZERS = {
    "loop Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "loop SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def state_of(model, optimizer):
    found = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    for number, slots in enumerate(optimizer.state_dict()["state"].values()):
        found |= {f"{number}/{slot}": value.detach().cpu().clone() for slot, value in slots.items()
                  if isinstance(value, torch.Tensor)}  # fmt: skip
    return found


def go_on(root, optimizer, device, steps, save=False, **asked):
    """Resume and train to ``steps``. Returns the step resumed, the exactness, the state there and at the end."""
    model, optimizer = small(optimizer, device)
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer, base_every=100, keep=Keep(99))
    begun = checkpointer.resume(**asked)
    first = state_of(model, optimizer)
    for step in range(begun, steps):
        source = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=source).to(device)
        optimizer.step()
        checkpointer.step()
    checkpointer.wait()
    last = state_of(model, optimizer)
    checkpointer.close(save=save)
    return begun, checkpointer.exactness, first, last


@pytest.mark.parametrize("way", ["from there to here", "from here to there"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_records_of_another_device_are_exact_or_refused(tmp_path, optimizer, way):
    """Where the digests that the optimizer needs are the same, the bits are those of training; where not, nothing is
    replayed unasked."""
    cpu = torch.device("cpu")
    notes = arithmetic.arithmetic_of(HERE), elsewhere(arithmetic.arithmetic_of, cpu)
    needed = arithmetic.operations_of([small(optimizer, cpu)[1]], after_update=False)
    apart = arithmetic.differing({"a": notes[0]}, {"b": notes[1]}, needed)
    print(f"{HERE} and the other place differ in {apart} of {needed}")

    def at_home(steps, **asked):
        return go_on(tmp_path, optimizer, HERE, steps, **asked)

    def away(steps, **asked):
        return elsewhere(lambda: go_on(tmp_path, optimizer, cpu, steps, **asked))

    write, read = (away, at_home) if way == "from there to here" else (at_home, away)
    *_, trained = write(6)
    if not apart:
        begun, exactness, first, _ = read(6)
        assert (begun, exactness, differing(first, trained)) == (6, "continuation", {})
        return
    with pytest.raises(OtherArithmetic) as refused:
        read(6)
    assert refused.value.step == 0
    assert write(6)[:2] == (6, "continuation")  # nothing was lost
    *_, trained = write(9)
    with pytest.warns(UserWarning, match="arithmetic of this machine"):
        begun, exactness, first, last = read(11, exactness="approximate")
    assert (begun, exactness) == (9, "approximate")
    for name, tensor in trained.items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-3, atol=1e-4)
    begun, exactness, first, _ = read(11)
    assert (begun, exactness, differing(first, last)) == (11, "continuation", {})


# A script of its own process


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


# More ways to keep steps


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
            assert differing(again.state(), states[step]) == {}, step
            for i in range(step, 9):
                assert torch.equal(again.step(i), losses[i + 1]), (step, i)
                again.optimizer.zero_grad()
                checkpointer.step()


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
                assert differing(states.setdefault(i, now), now) == {}, (until, i)
            checkpointer.save()
            if back < until:
                assert checkpointer.rollback(back) == back
                i = back
                assert differing(script.state(), states[back]) == {}, back
    again = Script(**SCRIPTS[name])
    with again.checkpointer(tmp_path, keep=Keep(99)) as checkpointer:
        assert checkpointer.resume() == 9 and differing(again.state(), states[9]) == {}


# Optimizers, and what else a script has


CAPTURABLE = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def configurations_of(kind):
    """Every option of a class one by one, on a device also those that a graph can hold."""
    found = {name: told for name, told in torch_optimizers.configurations().items() if told[0] == kind}
    if kind in CAPTURABLE and DEVICE == "cuda":
        for way in ({}, {"foreach": False}, {"foreach": True}):
            found[f"{kind} capturable {way}"] = (kind, {"capturable": True, **way})
    return found


@pytest.mark.parametrize("kind", torch_optimizers.OPTIONS)
def test_optimizers_of_torch_go_on_bit_for_bit(tmp_path, kind):
    if not hasattr(torch.optim, kind):
        pytest.skip(f"torch {torch.__version__} has no {kind}")
    assert changed_by_a_kill(tmp_path, configurations_of(kind), DEVICE) == []
