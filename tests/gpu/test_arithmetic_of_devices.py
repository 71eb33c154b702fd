"""Digests of a device's arithmetic, and records that another device or another precision reads.

Run with ``-m gpu``; where there is no CUDA device each case runs on the CPU.
"""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext

import pytest
import torch

from dist.training import muon
from gpu.processes import HERE, ended, largest_differences, started
from gpu.training import DEVICE
from holdfast.checkpoint import arithmetic
from holdfast.checkpointer import Checkpointer
from holdfast.errors import OtherArithmetic
from holdfast.optim import Apollo
from holdfast.state.live_state import LiveState
from holdfast.store.commit.retention import Keep
from support.other_processor import other_processor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),  # some start a process after the other, each of which makes a context
]


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
    return model, {**OPTIMIZERS, **MATRICES}[optimizer](list(model.parameters()))


OPTIMIZERS = {
    "loop Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "loop SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
MATRICES = {
    "Muon": lambda p: muon(p),
    "Apollo": lambda p: Apollo(p, lr=0.01, rank=4, update_gap=2),
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
    model, made = small(optimizer, cpu)
    update = {"optimizer": 0, "groups": made.param_groups}
    needed = arithmetic.operations_of(LiveState(model, [made]), [update], after_update=False)
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
        assert (begun, exactness, largest_differences(first, trained)) == (6, "continuation", {})
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
    assert (begun, exactness, largest_differences(first, last)) == (11, "continuation", {})


@pytest.mark.parametrize("name", ["loop Adam", "fused Adam", "Muon", "Apollo"])
@pytest.mark.parametrize("changed", [False, True], ids=["the same", "another"])
def test_another_precision_of_products_changes_no_replay(tmp_path, name, changed):
    """Updates that multiply matrices are replayed in the precision of training; others do not depend on it."""
    elementwise = name.endswith("Adam")
    torch.set_float32_matmul_precision("high")
    try:
        *_, trained = go_on(tmp_path, name, HERE, 6)
        torch.set_float32_matmul_precision("highest" if changed else "high")
        told = pytest.warns(UserWarning, match="matrix products of precision")
        with told if changed and not elementwise else nullcontext():
            begun, exactness, first, _ = go_on(tmp_path, name, HERE, 6)
        assert torch.get_float32_matmul_precision() == ("highest" if changed else "high")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (begun, exactness, largest_differences(first, trained)) == (6, "continuation", {})
