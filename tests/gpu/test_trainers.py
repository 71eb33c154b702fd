"""Trainers on a device: out of core the numbers of the same script in memory there, stopped and continued; in memory
killed and continued.

Where there is no device, each case runs on the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer

from holdfast.integrations import accelerate as with_accelerate
from holdfast.integrations.transformers import offloaded
from integrations_interrupt import Interrupt, Interrupted, close_engines
from offloaded_loop_script import NORM
from offloaded_loop_script import train as loop
from offloaded_script import everything, logged, make

pytestmark = [
    pytest.mark.usefixtures("same_bits"),
    pytest.mark.filterwarnings("ignore:.*use_cache was switched off"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(7)
    yield
    close_engines()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def assert_close(mine, theirs, rel=1e-3):
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-6)


def on_host(model):
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def same_weights(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", [{}, {"bf16": True, "dataloader_pin_memory": True}], ids=["fp32", "bf16"])
def test_trainer_logs_what_it_logs_in_memory(tmp_path, cuda_or_host, options):
    options = {
        "use_cpu": cuda_or_host == "cpu", "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2,
        **options,
    }  # fmt: skip
    plain, trainer = (
        make(Trainer, tmp_path / "a", **options),
        make(offloaded(Trainer), tmp_path / "b", **options),
    )
    for each in (plain, trainer):
        each.train()
    mine, theirs = ([e["loss"] for e in logged(each) if "loss" in e] for each in (trainer, plain))
    assert_close(mine, theirs, 0.02 if options.get("bf16") else 1e-3)
    saved = trainer.engine.state_dict()
    assert all(value.device.type == "cpu" for value in saved.values())
    assert trainer.engine._run.device.torch_device.type == cuda_or_host
    trainer.engine.close()
    if not options.get("bf16"):
        same_weights(on_host(trainer.model), on_host(plain.model))


def test_an_interrupted_trainer_ends_the_same(tmp_path, cuda_or_host):
    options = {"use_cpu": cuda_or_host == "cpu"}
    whole = make(offloaded(Trainer), tmp_path / "whole", **options)
    whole.train()
    expected = everything(whole)
    cut = make(offloaded(Trainer), tmp_path / "cut", callbacks=[Interrupt(5, "on_step_end")], **options)
    with pytest.raises(Interrupted):
        cut.train()
    close_engines()
    torch.manual_seed(7)
    again = make(offloaded(Trainer), tmp_path / "cut", **options)
    again.train()
    found = everything(again)
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name].cpu(), value.cpu()), name
    assert found["logged"] == expected["logged"]


def test_a_loop_of_accelerate_has_the_numbers_of_one_in_memory(tmp_path, cuda_or_host):
    def script(kind):
        torch.manual_seed(7)
        return loop(lambda **given: kind(**{**given, "cpu": cuda_or_host == "cpu"}), evaluates=True)

    plain = script(Accelerator)
    AcceleratorState._reset_state(reset_partial_state=True)
    mine = script(partial(with_accelerate.offloaded(Accelerator, tmp_path / "run", clipping=NORM)))
    for name in ("losses", "norms", "rates", "evaluated"):
        assert_close(getattr(mine, name), getattr(plain, name))
    same_weights(
        {name: value.cpu() for name, value in mine.weights.items()},
        {name: value.cpu() for name, value in plain.weights.items()},
    )


def test_lightning_has_the_numbers_of_a_fit_in_memory(tmp_path, cuda_or_host):
    pytest.importorskip("lightning")
    from holdfast.integrations.lightning import OffloadedStrategy
    from integrations.test_offloaded_lightning import fit

    on_device = {"accelerator": "cpu" if cuda_or_host == "cpu" else "gpu"}
    _, theirs, expected = fit(tmp_path, **on_device)
    torch.manual_seed(7)
    _, module, told = fit(tmp_path, strategy=OffloadedStrategy(tmp_path / "run"), **on_device)
    for mine, other in zip(told, expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-3)
    same_weights(on_host(module), on_host(theirs))


@pytest.mark.parametrize("script, value", [("sft", "loss"), ("policy", "reward")])
def test_trl_has_the_log_of_a_script_in_memory(tmp_path, cuda_or_host, script, value):
    """A reward is the number of letters, so texts that are drawn otherwise have another one."""
    pytest.importorskip("trl")
    from integrations import test_offloaded_trl
    from tiny_folders import write_folder

    folder = write_folder(tmp_path / "llama", dtype=torch.float32)
    told = []
    for kind, name in ((lambda cls: cls, "plain"), (offloaded, "mine")):
        trainer = getattr(test_offloaded_trl, script)(
            kind, folder, tmp_path / name, adapters=True, use_cpu=cuda_or_host == "cpu"
        )
        torch.manual_seed(0)  # which draws the tokens of texts
        trainer.train()
        told.append([entry[value] for entry in logged(trainer) if value in entry])
    assert_close(told[1], told[0])


# In memory: killed and resumed


def ran(kind, device, precision, root, *at):
    """What a script of ``killed_trainers`` said, until its end or its death."""
    script = Path(__file__).with_name("killed_trainers.py")
    done = subprocess.run(
        [sys.executable, str(script), kind, device, precision, str(root), *map(str, at)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == (-9 if at else 0), done.stderr[-3000:]
    return None if at else json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["Trainer", "LoRA", "accelerate", "Lightning"])
def test_a_killed_script_ends_as_one_that_was_not(tmp_path, cuda_or_host, kind, precision):
    pytest.importorskip({"LoRA": "peft", "Lightning": "lightning"}.get(kind, "accelerate"))
    if (cuda_or_host, precision) == ("cpu", "fp16"):
        pytest.skip("the trainers scale losses on devices alone")
    whole = ran(kind, cuda_or_host, precision, tmp_path / "whole")
    ran(kind, cuda_or_host, precision, tmp_path / "cut", 7)  # within an epoch
    rest = ran(kind, cuda_or_host, precision, tmp_path / "cut")
    count = len(rest["losses"])
    assert 0 < count < len(whole["losses"]), f"{count} of {len(whole['losses'])} losses after the kill"
    pairs = zip(rest["losses"], whole["losses"][-count:], strict=True)
    differing = [(i, mine, theirs) for i, (mine, theirs) in enumerate(pairs) if mine != theirs]
    assert not differing, f"first of {len(differing)} of {count} losses: {differing[0]}"
    assert rest["digest"] == whole["digest"]
