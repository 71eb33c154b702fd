"""What came to the Checkpointer since it first ran on a device: notes of arithmetic, copies in memory, going back, the
commands, every kind of optimizer, ranks and standbys.

Run with ``-m gpu``. Where there is no CUDA device each case runs on the CPU, so that the case itself is known to be
right.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from sysconfig import get_paths
from threading import current_thread

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import named_optimizers
import torch_optimizers
from checkpoint.test_arithmetic import other_processor
from crash import test_drill, test_standby
from dist.training import muon, whole_tensors, wrapped
from gpu.test_survives import SCRIPTS, train
from gpu.training import DEVICE, Net, Script
from holdfast.checkpoint import arithmetic
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, OtherArithmetic
from holdfast.events import read_events
from holdfast.formats.restore import read_tensors
from holdfast.opening import source_of
from holdfast.optim import Apollo
from holdfast.state.layout.regions import Region
from holdfast.store.commit.retention import Keep
from support.switching import switch_often
from test_checkpointer_torch_optimizers import changed_by_a_kill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),  # some start a process after the other, each of which makes a context
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
    torch.set_default_device(None)


def started(*words, **environment):
    """A fresh interpreter: a fork of a process that has used the device could not use it."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process, code=0):
    """What the process printed. It ends with ``code``, or with one of several."""
    out, err = process.communicate(timeout=110)
    assert process.returncode in (code if isinstance(code, tuple) else (code,)), (
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
        assert reached >= durable and differing(again.state(), states[reached]) == {}, reached


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


class Setup:
    """A script of one of ``KINDS``: ``make`` returns a model, its optimizers and more for the Checkpointer."""

    def __init__(self, make):
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        self.model, self.optimizers, self.more = make()
        self.batch = (16, 31)
        if "batch" in self.more:
            self.batch = self.more.pop("batch")
        self.before, self.after = self.more.pop("before", None), self.more.pop("after", lambda: None)

    def step(self, i):
        return self.train(self.batch_of(i)).cpu()

    def batch_of(self, i):
        x = torch.randn(self.batch, generator=torch.Generator().manual_seed(i), device="cpu").to(DEVICE)
        return x if self.before is None else self.before(x)

    def train(self, x):
        """One iteration, which waits for nothing."""
        loss = self.model(x).float().pow(2).mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.after()
        return loss.detach()

    def state(self):
        found = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, slots in optimizer.state_dict()["state"].items():
                found |= {f"{number}/{parameter}/{slot}": value.detach().cpu().clone() for slot, value in slots.items()
                          if isinstance(value, torch.Tensor)}  # fmt: skip
        return found

    def checkpointer(self, root, **options):
        return Checkpointer(
            root,
            model=self.model,
            optimizer=self.optimizers,
            base_every=3,
            keep=Keep(9),
            **self.more,
            **options,
        )


def net():
    return Net().to(DEVICE)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=0.01, **options)


def groups():
    model = net()
    matrices, rest = named_optimizers.matrices(model), named_optimizers.vectors(model)
    given = [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in rest if p.dim()], "lr": 0.003},
             {"params": [p for p in rest if not p.dim()], "betas": (0.5, 0.9)}]  # fmt: skip
    return model, [adamw(given)], {}


def several():
    model = net()
    matrices, rest = named_optimizers.matrices(model), named_optimizers.vectors(model)
    return model, [torch.optim.Muon(matrices, lr=0.01), adamw(rest, fused=True)], {}


def masters():
    """Parameters in bf16, and an optimizer of copies in fp32."""

    class Masters(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net().bfloat16()
            copies = (torch.nn.Parameter(p.detach().float()) for p in self.net.parameters())
            self.masters = torch.nn.ParameterList(copies)
            self.net.requires_grad_(False)

        def forward(self, x):
            names = [name for name, _ in self.net.named_parameters()]
            rounded = {name: p.bfloat16() for name, p in zip(names, self.masters, strict=True)}
            return torch.func.functional_call(self.net, rounded, x.bfloat16())

    model = Masters().to(DEVICE)
    return model, [adamw(model.masters.parameters())], {}


def bf16():
    model = net().bfloat16()
    return model, [adamw(model.parameters())], {"before": lambda x: x.bfloat16()}


def autocast():
    model = net()
    forward = model.forward

    def cast(x):
        with torch.autocast(DEVICE, torch.bfloat16):
            return forward(x)

    model.forward = cast
    return model, [adamw(model.parameters())], {}


def channels_last():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 9, 3), torch.nn.BatchNorm2d(9), torch.nn.Conv2d(9, 5, 1), torch.nn.Dropout2d(0.3)
    ).to(DEVICE, memory_format=torch.channels_last)
    more = {"batch": (4, 3, 7, 7), "before": lambda x: x.to(memory_format=torch.channels_last)}
    return model, [adamw(model.parameters())], more


def averaged():
    model = net()
    averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return model, [adamw(model.parameters())], {
        "averages": averages, "after_update": lambda: averages.update_parameters(model)
    }  # fmt: skip


def scheduled():
    """A learning rate in a tensor of the device, as a compiled or captured step would have it."""
    model = net()
    if DEVICE == "cuda":
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(0.01, device=DEVICE), capturable=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, [optimizer], {"scheduler": scheduler, "after": scheduler.step}


class Noise:
    """A generator of the device, whose position is the script's to keep."""

    def __init__(self):
        self.generator = torch.Generator(device=DEVICE).manual_seed(3)

    def __call__(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator, device=DEVICE)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def noisy():
    model, noise = net(), Noise()
    return model, [adamw(model.parameters())], {"also": {"noise": noise}, "before": noise}


def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["first", "second"], lora_dropout=0.1)
    model = peft.get_peft_model(Net(), config).to(DEVICE).train()
    return model, [adamw([p for p in model.parameters() if p.requires_grad])], {}


def compiled_by(backend):
    def compiled():
        torch._dynamo.reset()
        model = net()
        model.compile(backend=backend)
        return model, [adamw(model.parameters())], {}

    return compiled


def named(name):
    def named_one():
        model = net()
        return model, [named_optimizers.OPTIMIZERS[name](model)], {}

    return named_one


def graphed():
    """Forward and backward captured as graphs, which torch runs for the model from then on."""
    model = torch.nn.Sequential(torch.nn.Linear(31, 257), torch.nn.ReLU(), torch.nn.Linear(257, 5)).to(DEVICE)
    if DEVICE == "cuda":
        model = torch.cuda.make_graphed_callables(model, (torch.randn(16, 31, device=DEVICE),))
        for parameter in model.parameters():
            parameter.grad = None
    return model, [adamw(model.parameters(), fused=True)], {}


def by_default():
    """A script that makes everything on the device unasked, and touches few rows of an embedding."""
    torch.set_default_device(DEVICE)
    model = torch.nn.Sequential(torch.nn.Embedding(600, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 5))
    words = {"before": lambda x: (x[:, :5].abs() * 997).long() % 600}
    return model, [adamw(model.parameters())], words


IN_NET = ("adafactor", "grass", "grass, rows by chance", "apollo", "apollo-mini", "adamw in bf16", "adamw in bytes",
          "muon and adamw")  # fmt: skip
KINDS = {
    each.__name__: each
    for each in (
        groups,
        several,
        masters,
        bf16,
        autocast,
        channels_last,
        averaged,
        scheduled,
        noisy,
        lora,
        graphed,
        by_default,
    )
}
KINDS |= {name: named(name) for name in IN_NET}
KINDS |= {"compiled eagerly": compiled_by("aot_eager")}
if (
    DEVICE == "cuda" and shutil.which("gcc") and (Path(get_paths()["include"]) / "Python.h").exists()
):  # for Triton
    KINDS["compiled by inductor"] = compiled_by("inductor")


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
            assert differing(script.state(), states[begin]) == {}
        for i in range(begin, until):
            loss = script.step(i)
            assert torch.equal(loss, losses[i + 1]), (i, float(loss), float(losses[i + 1]))
            checkpointer.step()
            assert differing(script.state(), states[i + 1]) == {}, i
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
        assert differing(script.state(), states[reached]) == {}
        again = script.train(script.batch_of(6))
        checkpointer.step()
        assert differing(script.state(), states[7]) == {}, float(again)


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
    assert (begun, exactness, differing(first, trained)) == (6, "continuation", {})


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


# The commands


@pytest.fixture
def fresh(monkeypatch):
    """Commands of other tests are interpreters that know the device, in place of forks."""

    def start(*words, env, cwd=None, modules=(), starts_others=False, **streams):
        return subprocess.Popen(
            [sys.executable, *map(str, words)], env={**ENVIRONMENT, **env}, cwd=cwd, **streams
        )

    def run_to_end(*words, timeout=None, **how):
        process = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    for module in (test_standby, test_drill):
        monkeypatch.setattr(module, "run_python", run_to_end)
        monkeypatch.setitem(module.ENVIRONMENT, "DEVICE", DEVICE)
        monkeypatch.setitem(module.ENVIRONMENT, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(test_standby, "start_python", start)


def test_a_standby_takes_over_with_the_same_bits(tmp_path, fresh):
    test_standby.test_killed_trainer_is_taken_over_with_the_same_bits(tmp_path)


def test_a_drill_finds_a_sound_script_equal(tmp_path, fresh):
    code, verdict, said = test_drill.drill(
        tmp_path, test_drill.DRILLED / "sound.py", options=["--kills", "1", "--until", "8"]
    )
    assert (code, verdict["equal"], verdict["step"]) == (0, True, 8), (verdict, said)
    assert len(verdict["kills"]) == 1 and os.listdir(tmp_path) == []


def test_commands_read_a_run_of_the_device(tmp_path, holdfast):
    """In this process. What they replay they replay where it was trained."""
    states = {}
    for name in ("one", "other"):
        states, _ = train(tmp_path / name, Script())
    assert holdfast("ls", tmp_path / "one").code == 0
    for verb in ("show", "verify", "report"):
        said = holdfast(verb, tmp_path / "one")
        assert said.code == 0, (verb, said)
    said = holdfast("diff", f"{tmp_path}/one@7", f"{tmp_path}/other@7")
    assert said.code == 0, said
    said = holdfast("diff", f"{tmp_path}/one@6", f"{tmp_path}/other@7")
    assert said.code == 1, said
    said = holdfast("convert", f"{tmp_path}/one@7", tmp_path / "7.safetensors", "--to", "safetensors")
    assert said.code == 0, said
    found = load_file(tmp_path / "7.safetensors")
    named = {name: states[7][name].cpu() for name in found if name in states[7]}
    assert named and differing(named, {name: found[name] for name in named}) == {}
    said = holdfast("compact", tmp_path / "one")
    assert said.code == 0, said
    again = Script()
    with again.checkpointer(tmp_path / "one") as checkpointer:
        assert checkpointer.resume() == 9 and differing(again.state(), states[9]) == {}


# Ranks


def rank(folder, kind, root, steps, *kill_at, number=0, world_size=1):
    """A process that trains as a rank."""
    place = {"RANK": str(number), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    rendezvous = str(folder / f"rendezvous-{kind}-{root.name}-{steps}-{len(kill_at)}-{root.exists()}")
    words = (TESTS / "gpu" / "ranks.py", kind, root, steps, *kill_at)
    return started(*words, RENDEZVOUS=rendezvous, **place)


def said_by(process, code=0):
    return [json.loads(line) for line in ended(process, code).splitlines() if line.startswith("{")]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path, kind):
    """A world of one rank: on a device its group is NCCL's. Then one process of a CPU reads what it wrote."""
    whole = said_by(rank(tmp_path, kind, tmp_path / "whole", 10))
    assert len(whole) == 10
    said = said_by(rank(tmp_path, kind, tmp_path / "cut", 10, 6), -9)
    assert said == whole[:6]
    assert said_by(rank(tmp_path, kind, tmp_path / "cut", 10)) == whole[6:]
    expected = torch.load(f"{tmp_path}/cut.whole")
    model = wrapped("plain", 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with Checkpointer(tmp_path / "cut", model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.resume(step=10) == 10
    found = {name: tensor.detach() for name, tensor in whole_tensors(model, optimizer).items()}
    assert differing(found, expected) == {}


@pytest.mark.parametrize("place", ["made", "made.pt"])
def test_a_sharded_state_is_converted(tmp_path, holdfast, place):
    """To a folder of torch.distributed.checkpoint, and to one file."""
    assert len(said_by(rank(tmp_path, "fsdp", tmp_path / "run", 6))) == 6
    to = "torch" if place.endswith(".pt") else "dcp"
    said = holdfast("convert", tmp_path / "run", tmp_path / place, "--to", to)
    assert said.code == 0, said
    expected, source = torch.load(f"{tmp_path}/run.whole"), source_of(str(tmp_path / place))
    wanted = {key: tensor for key, tensor in expected.items() if key in source.atoms}
    assert len(wanted) >= 7, (sorted(source.atoms), sorted(expected))
    regions = [(source.atoms[key], Region.whole(tensor.shape)) for key, tensor in wanted.items()]
    found = dict(zip(wanted, read_tensors(source, regions), strict=True))
    assert differing(found, wanted) == {}


def test_two_ranks_share_the_device(tmp_path):
    """A group of gloo, which adds up what is on a device by way of the host. One rank may see the other die."""

    def world(root, *words, code=0):
        begun = root.exists()
        processes = []
        for number in range(2):
            place = {"RANK": str(number), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
            place["RENDEZVOUS"] = str(tmp_path / f"rendezvous-{root.name}-{begun}")
            processes.append(started(TESTS / "gpu" / "ranks.py", "ddp", root, *words, **place))
        return [said_by(process, code) for process in processes]

    whole = world(tmp_path / "whole", 8)
    assert world(tmp_path / "cut", 8, 5, code=(-9, 1)) == [said[:5] for said in whole]
    assert world(tmp_path / "cut", 8) == [said[5:] for said in whole]
