"""Live engines of the real DeepSpeed with the Adams that it makes itself: FusedAdam, and DeepSpeedCPUAdam.

Their kernels are the real ones for a CPU, which DeepSpeed compiles when they are first used, and keeps.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import holdfast
from combined import CAMPAIGN
from holdfast.cli.main import app
from holdfast.optim import AdamWBF16
from holdfast.state.encoding import decode
from peers.launching import deepspeed
from peers.odd_model import Model, groups_of
from peers.test_deepspeed import tensors
from peers.test_live import LIVE, assert_same, open_run
from peers.test_live_sources import assert_refused, plain_run, plain_steps

COMPILES = all(map(shutil.which, ("c++", "ninja")))

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not COMPILES, reason="DeepSpeed compiles its Adams, by c++ and ninja, which are not here"
    ),
]

FUSED = {"made": "AdamW"}
CPU = {"cpu_adam": True}
TORCH = {"made": "AdamW", "params": {"torch_adam": True}}

SAVED = {
    "fused-1": {"stage": 1, **FUSED},
    "fused-3": {"stage": 3, "zero": {"sub_group_size": 100}, **FUSED},
    "cpu-2": {"stage": 2, **CPU},
    "torch-1": {"stage": 1, **TORCH},
    "sgd-1": {"stage": 1, "sgd": True},
}
"""Checkpoints of two ranks."""

BEGUN = {
    "fused-1": [(2, {"stage": 1, **FUSED}), (2, {"stage": 2, **TORCH})],
    "fused-3": [(2, {"stage": 3, "zero": {"sub_group_size": 100}, **FUSED})],
    "cpu-2": [(2, {"stage": 2, **CPU})],
    "torch-1": [(3, {"stage": 3, "zero": {"sub_group_size": 60}, **FUSED})],
}
if CAMPAIGN:
    BEGUN["fused-1"].append((3, {"stage": 3, **FUSED}))
    BEGUN["fused-3"] += [(3, {"stage": 1, **FUSED}), (2, {"stage": 1, **CPU})]
    BEGUN["cpu-2"].append((2, {"stage": 3, **FUSED}))
    BEGUN["torch-1"].append((2, {"stage": 1, **FUSED}))


def by_of(job):
    """The class that a job has."""
    if job.get("cpu_adam"):
        return "DeepSpeedCPUAdam"
    return "AdamW" if job.get("params") else "FusedAdam"


CASES = {
    f"{source}-to-{by_of(job)}-{job['stage']}-of-{world}": (source, world, job)
    for source, each in BEGUN.items()
    for world, job in each
}

AGAIN = {
    "fused-1-to-FusedAdam-1-of-2": {"stage": 3, **TORCH},
    "torch-1-to-FusedAdam-3-of-3": {"stage": 1, **FUSED},
    "fused-1-to-AdamW-2-of-2": {"stage": 2, **FUSED},
    "cpu-2-to-DeepSpeedCPUAdam-2-of-2": {"stage": 1, **FUSED},
}
"""From the runs that these saved, on two ranks."""


COMPILE_SECONDS = 900
"""For DeepSpeed's two operators: minutes, beside other suites too."""

COMPILE = """
import faulthandler
faulthandler.dump_traceback_later({seconds})
import deepspeed.ops.op_builder
for builder in (deepspeed.ops.op_builder.FusedAdamBuilder, deepspeed.ops.op_builder.CPUAdamBuilder):
    builder().load()
"""


COMPILER = f"""#!{sys.executable}
import fcntl, os, subprocess, sys

folder = os.path.dirname(__file__)
given = ["-I" + folder, *(word for word in sys.argv[1:] if word != "-g")]
header = os.path.join(folder, "torch_once.h")
if "-c" in given:
    options, words = [], iter(given)
    for word in words:
        if word in ("-c", "-o", "-MF"):
            next(words)
        elif word == "-isystem":
            options += [word, next(words)]
        elif word.startswith("-") and word != "-MMD" and "TORCH_EXTENSION_NAME" not in word:
            options.append(word)
    with open(header + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(header + ".gch"):
            with open(header, "w") as file:
                file.write("#include <torch/extension.h>\\n")
            subprocess.run(["c++", *options, "-x", "c++-header", header, "-o", header + ".gch"], check=True)
    given = ["-include", header, *given]
os.execvp("c++", ["c++", *given])
"""
"""Compiles torch's headers, most of the work, once for all files, and leaves out what a debugger needs."""

EXTENSION = """#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}
"""
"""What the operators use of ``torch/extension.h``, which has torch's modules and optimizers in C++ besides."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """DeepSpeed's operators, in a folder of this session's: in the usual one, a lock that a killed process left behind
    would be waited for without end."""
    folder = tmp_path_factory.mktemp("extensions")
    compiler = folder / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (folder / "torch").mkdir()
    (folder / "torch" / "extension.h").write_text(EXTENSION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        patch.setenv("CXX", str(compiler))
        compile_operators()
        for header in folder.glob("*.gch"):  # most of a gigabyte
            header.unlink()
        yield


def compile_operators():
    code = COMPILE.format(seconds=COMPILE_SECONDS - 5)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            told, _ = process.communicate()
            pytest.skip(f"DeepSpeed did not compile its Adams in {COMPILE_SECONDS} s here: {told[-1000:]}")
    assert process.returncode == 0, told[-4000:]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adam")


@pytest.fixture(scope="module")
def saved(compiled, root):
    jobs = [{"do": "save", "name": n, "folder": str(root / n), **job} for n, job in SAVED.items()]
    return deepspeed(root, 2, jobs)


@pytest.fixture(scope="module")
def begun(saved, root):
    """What each live engine told, by name. They were trained before."""
    found = {}
    for world in (2, 3):
        jobs = [
            {**job, "name": name, "source": str(root / source), "run": str(root / "run" / name), "trained": 1}
            for name, (source, ranks, job) in CASES.items()
            if ranks == world
        ]
        found |= deepspeed(root, world, jobs, LIVE)
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_deepspeeds_own_adam_goes_on(saved, begun, name):
    source, world, job = CASES[name]
    before, after = saved[source], begun[name]
    assert (after["refused"], after["start"], after["updated_by"]) == (None, 3, by_of(job))
    assert_same(after["tensors"], before["tensors"])
    assert after["working_alike"]
    assert set(after["steps"]) == {3.0} and set(after["steps_later"]) == {6.0}
    assert after["counted_in"] == (["Tensor"] if by_of(job) == "AdamW" else ["int"])
    assert after["rates"] == before["rates"]
    same = world == 2 and {"run": 0, **SAVED[source]} == {"run": 0, **job}
    assert after["losses"] == (before["losses"] if same else pytest.approx(before["losses"], rel=1e-6))


@pytest.mark.parametrize("name", CASES)
def test_what_it_saves_is_what_torchs_adamw_would_have(begun, root, name):
    done = CliRunner().invoke(app, ["verify", f"{root / 'run' / name}@3"])
    assert done.exit_code == 0, done.output
    read = open_run(root / "run" / name)
    found = tensors(read)
    for key, tensor in begun[name]["tensors"].items():
        assert torch.equal(found[key], tensor), key
    trained = {key.rpartition("/")[0] for key in begun[name]["tensors"]}
    assert {key for key in found if key.endswith("/step")} == {f"{name}/step" for name in trained}
    assert all(
        found[f"{name}/step"] == 3 and found[f"{name}/step"].dtype == torch.float32 for name in trained
    )
    groups = [decode(group) for group in read.progress["groups"]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(group["decoupled_weight_decay"] and "step" not in group for group in groups)


@pytest.fixture(scope="module")
def again(begun, root):
    jobs = [
        {
            **job,
            "name": f"again-{name}",
            "source": str(root / "run" / name),
            "later": str(root / "run" / name),
        }
        for name, job in AGAIN.items()
    ]
    return deepspeed(root, 2, jobs, LIVE)


@pytest.mark.parametrize("name", AGAIN)
def test_an_engine_goes_on_from_what_another_with_another_adam_saved(saved, begun, again, name):
    first, after = begun[name], again[f"again-{name}"]
    assert (after["refused"], after["start"], after["saved_later"]) == (None, 3, 6)
    assert_same(after["tensors"], first["tensors"])
    assert set(after["steps"]) == {3.0} and after["updated_by"] == by_of(AGAIN[name])
    assert after["losses"] == pytest.approx(first["losses"], rel=1e-6)


def test_one_process_with_torchs_adamw_goes_on_from_it(begun, root, tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model))
    name = "fused-3-to-FusedAdam-3-of-2"
    with holdfast.Checkpointer(tmp_path / "next", model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.resume(source=f"{root / 'run' / name}@3") == 3
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                state = optimizer.state[parameter]
                assert torch.equal(state["exp_avg_sq"], begun[name]["tensors"][f"{key}/exp_avg_sq"]), key
                assert state["step"].dtype == torch.float32 and state["step"] == 3, key


def run_of(folder, kind=torch.optim.Adam, **options):
    """A run of a Checkpointer with an optimizer of this kind."""
    model = Model()
    optimizer = kind(groups_of(model), **options)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        plain_steps(model, optimizer, 0, 2, checkpointer.step)


@pytest.fixture(scope="module")
def sources(root):
    """What no ZeRO wrote; the losses after a run of AdamW, and from weights alone."""
    held, _, losses = plain_run(root / "plain")
    run_of(root / "adam")
    run_of(root / "amsgrad", amsgrad=True)
    run_of(root / "bf16", kind=AdamWBF16)
    torch.manual_seed(5)
    model = Model()
    (root / "hf").mkdir()
    kept = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(kept, root / "hf" / "model.safetensors", metadata={"format": "pt"})
    return held, losses, plain_steps(model, torch.optim.AdamW(groups_of(model)), 0, 3)


@pytest.fixture(scope="module")
def others(saved, sources, root):
    """What engines told that begin from what no ZeRO wrote, or from what is not of their kind."""
    engine = {"trained": 2, "unscheduled": True}
    jobs = [
        {**job, **engine, "name": f"{source}-{by_of(job)}", "source": str(root / source), "break": how}
        for source in ("plain", "hf", "adam", "bf16", "amsgrad", "sgd-1")
        for job, how in (({"stage": 3, **FUSED}, "counting"), ({"stage": 2, **CPU}, None))
    ]
    l2 = {"stage": 1, "made": "Adam", "params": {"adam_w_mode": False}}
    jobs.append({**l2, **engine, "name": "adam-l2", "source": str(root / "adam")})
    return deepspeed(root, 2, jobs, LIVE)


OWN = pytest.mark.parametrize("kind", ["FusedAdam", "DeepSpeedCPUAdam"])


@OWN
def test_it_goes_on_from_a_run_of_torchs_adamw(sources, others, kind):
    held, losses, _ = sources
    told = others[f"plain-{kind}"]
    assert (told["refused"], told["start"], told["counted_in"]) == (None, 3, ["int"])
    assert_same(told["tensors"], held)
    assert set(told["steps"]) == {3.0} and set(told["steps_later"]) == {6.0}
    assert told["losses"] == pytest.approx(losses, rel=1e-6)
    assert not any("goes on without" in text for text in told["warned"])


@OWN
def test_from_weights_alone_it_counts_anew(sources, others, kind):
    told = others[f"hf-{kind}"]
    assert (told["refused"], told["start"], told["steps"]) == (None, 0, [])
    assert set(told["steps_later"]) == {3.0}  # whatever its groups had, of a checkpoint of long ago
    assert told["losses"] == pytest.approx(sources[2], rel=1e-6)


@OWN
def test_that_its_weight_decay_is_another_than_the_sources_is_told(others, kind):
    told = others[f"adam-{kind}"]
    assert (told["refused"], told["start"]) == (None, 2)
    assert any(f"{kind} goes on without its decoupled_weight_decay=False" in text for text in told["warned"])
    told = others["adam-l2"]
    assert (told["refused"], told["updated_by"]) == (None, "FusedAdam")
    assert not any("goes on without" in text for text in told["warned"])


@OWN
def test_moments_of_another_type_are_as_its_kernels_take_them(root, others, kind):
    told, found = others[f"bf16-{kind}"], tensors(holdfast.From(root / "bf16").source())
    assert (told["refused"], told["held_as"]) == (None, ["torch.float32"])
    for key, tensor in told["tensors"].items():
        assert torch.equal(found[key].float(), tensor), key
    assert found["up.weight/exp_avg"].dtype == torch.bfloat16


@OWN
@pytest.mark.parametrize(
    ("source", "text"), [("sgd-1", "another kind of optimizer"), ("amsgrad", "max_exp_avg_sq")]
)
def test_state_that_it_does_not_keep_is_refused_with_nothing_touched(others, kind, source, text):
    assert_refused(others[f"{source}-{kind}"], "RunMismatch", text)
