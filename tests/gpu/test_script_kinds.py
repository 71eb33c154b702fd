"""Every kind of optimizer and of script on a device: killed and continued, without waiting, or refused by name.

Run with ``-m gpu``; where there is no CUDA device each case runs on the CPU.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from threading import current_thread

import pytest
import torch

import torch_optimizers
from gpu.processes import events, largest_differences
from gpu.script_kinds import KINDS, Setup, adamw, lora
from gpu.training import DEVICE
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput
from test_checkpointer_torch_optimizers import changed_by_a_kill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),  # some start a process after the other, each of which makes a context
]


CAPTURABLE = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def is_there(told):
    """Whether this torch has an optimizer, with such options, for the device."""
    parameter = torch.nn.Parameter(torch.ones(2, 2, device=DEVICE))
    parameter.grad = torch.ones_like(parameter)
    try:
        torch_optimizers.make(*told, [parameter]).step()
    except (RuntimeError, ValueError, TypeError, AssertionError):
        return False
    return True


def configurations_of(kind):
    """Every option of a class one by one, on a device also those that a graph can hold."""
    found = {name: told for name, told in torch_optimizers.configurations().items() if told[0] == kind}
    if kind in CAPTURABLE and DEVICE == "cuda":
        for way in ({}, {"foreach": False}, {"foreach": True}):
            found[f"{kind} capturable {way}"] = (kind, {"capturable": True, **way})
    there = {name: told for name, told in found.items() if is_there(told)}
    print(f"not there: {sorted(found.keys() - there.keys())}")
    assert len(there) > len(found) * 2 / 3, there
    return there


@pytest.mark.parametrize("kind", torch_optimizers.OPTIONS)
def test_optimizers_of_torch_go_on_bit_for_bit(tmp_path, kind):
    if not hasattr(torch.optim, kind):
        pytest.skip(f"torch {torch.__version__} has no {kind}")
    assert changed_by_a_kill(tmp_path, configurations_of(kind), DEVICE) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_script_of_a_kind_goes_on_bit_for_bit(tmp_path, kind):
    """Beside a plain loop without a Checkpointer: losses, which show dropout, and states."""
    plain, losses, states = Setup(KINDS[kind]), {}, {}
    for i in range(8):
        losses[i + 1] = plain.step(i)
        if "after_update" in plain.more:
            plain.more["after_update"]()
        states[i + 1] = plain.state()
    for begin, until in ((0, 5), (5, 8)):
        script = Setup(KINDS[kind])
        checkpointer = script.checkpointer(tmp_path)
        assert checkpointer.resume() == begin
        if begin:
            assert largest_differences(script.state(), states[begin]) == {}
        for i in range(begin, until):
            loss = script.step(i)
            assert torch.equal(loss, losses[i + 1]), (i, float(loss), float(losses[i + 1]))
            checkpointer.step()
            assert largest_differences(script.state(), states[i + 1]) == {}, i
        checkpointer.wait()
        checkpointer.close(save=False)
    assert not events(tmp_path, "gap"), events(tmp_path, "gap")


@contextmanager
def waits_told():
    """What waits for the device, by thread, as torch tells it; nothing does on a CPU (see tests/played)."""
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *of: told.append((current_thread().name, str(of[0])))
        warnings.warn("a synchronizing call of a test", stacklevel=1)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield told
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert told.pop(0)[0] == current_thread().name


@pytest.mark.parametrize("kind", ["groups", "several", "lora", "channels_last", "bf16"])
@pytest.mark.parametrize("every", [{"base_every": 2}, {"every": 2}], ids=str)
def test_no_step_waits_for_the_device(tmp_path, kind, every):
    """Bases too are copied while training goes on. The recorder's thread may wait."""
    script = Setup(KINDS[kind])
    torch.use_deterministic_algorithms(False)  # which may wait by itself
    batches, where = [script.batch_of(i) for i in range(14)], []
    with Checkpointer(
        tmp_path, model=script.model, optimizer=script.optimizers, **script.more, **every
    ) as checkpointer:
        checkpointer.resume()
        for x in batches[:8]:
            script.train(x)
            checkpointer.step()
        checkpointer._backend.drain()
        with waits_told() as told:
            for x in batches[8:]:
                script.train(x)
                where.append(f"{len(told) - 1} after the iteration of step {checkpointer.steps_done + 1}")
                checkpointer.step()
    here = [text for thread, text in told if thread == current_thread().name]
    waits = [text for text in here if "synchroniz" in text and "prototype feature" not in text]
    assert not waits, (waits, where)


def test_records_hold_adapters_alone(tmp_path):
    script = Setup(lora)
    with script.checkpointer(tmp_path) as checkpointer:
        checkpointer.resume()
        script.step(0)
        checkpointer.step()
        [slot, *_] = checkpointer._backend.pool.slots
        names = [entry.key for layout in slot.layouts for entry in layout.entries]
    assert names and all("lora_" in name for name in names), names


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU captures no graphs; tests/played shows the refusal")
def test_a_captured_step_is_refused(tmp_path):
    model = torch.nn.Linear(4, 3).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device=DEVICE), capturable=True)
    x = torch.randn(2, 4, device=DEVICE)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            checkpointer.step()
        checkpointer.wait()
        torch.cuda.synchronize()
        with pytest.raises(BadInput, match="captured as a graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_a_compiled_step_and_a_closure_are_refused(tmp_path):
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 3).to(DEVICE)
    optimizer = adamw(model.parameters())
    x = torch.randn(2, 4, device=DEVICE)
    checkpointer = Checkpointer(tmp_path / "compiled", model=model, optimizer=optimizer)
    checkpointer.resume()
    model(x).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    with pytest.raises(BadInput, match="step was compiled"):
        checkpointer.step()
    checkpointer.close()
    with pytest.raises(BadInput, match="closure"):
        Checkpointer(tmp_path / "closure", model=model, optimizer=torch.optim.LBFGS(model.parameters()))
