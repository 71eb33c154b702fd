"""A standby, the drill and the commands on a run of a device.

Run with ``-m gpu``; where there is no CUDA device each case runs on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from crash import test_drill, test_standby
from gpu.processes import ENVIRONMENT, largest_differences
from gpu.test_survives import train
from gpu.training import DEVICE, Script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),  # some start a process after the other, each of which makes a context
]


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
    assert named and largest_differences(named, {name: found[name] for name in named}) == {}
    said = holdfast("compact", tmp_path / "one")
    assert said.code == 0, said
    again = Script()
    with again.checkpointer(tmp_path / "one") as checkpointer:
        assert checkpointer.resume() == 9 and largest_differences(again.state(), states[9]) == {}
