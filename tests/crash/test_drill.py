"""Whole drills: scripts of their own processes, killed and resumed, and what the command says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist.world import World
from support.warm_python import LAUNCHED, run_python

HERE = Path(__file__).parents[2]
DRILLED = HERE / "tests" / "drilled"
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")  # fmt: skip


def drill(cwd, *arguments, options=()):
    """The exit code of a drill, and what ``--json`` printed."""
    command = ["-m", "holdfast", "drill", "--json", *options, "--", sys.executable, *arguments]
    done = run_python(*command, cwd=cwd, env=ENVIRONMENT, modules=LAUNCHED, starts_others=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.campaign
@pytest.mark.crash
@pytest.mark.timeout(300)
def test_sound_script_is_equal_after_kills(tmp_path):
    code, verdict, said = drill(tmp_path, DRILLED / "sound.py", options=["--kills", "2", "--until", "8"])
    assert (code, verdict["equal"], verdict["step"]) == (0, True, 8), said
    assert len(verdict["kills"]) == 2 and verdict["kills"][-1]["resumed_after"] > 0
    [states] = verdict["states"].values()
    assert states["compared"] == 12 and not states["different"]
    assert os.listdir(tmp_path) == []


FAULTS = [("another_run", "another-run"), ("own_generator", "generator"), ("no_position", "loader"),
          ("own_value", "value"), ("unlike_itself", "data")]  # fmt: skip


def names(verdict, name, kind):
    """Whether a verdict names a planted fault, with its step."""
    first = verdict["first"]
    is_told = kind == "another-run" or (first and 1 <= first["step"] <= 8 and first["tensors"])
    found = verdict["equal"], verdict["reason"]["kind"], verdict["equal_with_itself"]
    return found == (False, kind, name != "unlike_itself") and bool(is_told)


@pytest.mark.campaign
@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name, kind", FAULTS)
def test_fault_is_told_with_its_step(tmp_path, name, kind):
    code, verdict, said = drill(
        tmp_path, DRILLED / f"{name}.py", options=["--kills", "1", "--until", "8", "--seed", "3"]
    )
    assert code == 1 and names(verdict, name, kind), (verdict, said)


@pytest.fixture(scope="module")
def starts():
    """Drills whose starts are forks, which need no second each."""
    with World("drilled_starts") as world:
        yield world


def forked(starts, tmp_path, name, **options):
    [said] = starts.run(1, script=DRILLED / f"{name}.py", folder=tmp_path, options={"until": 8, **options})
    assert "verdict" in said, said
    return said["verdict"]


@pytest.mark.crash
@pytest.mark.parametrize("name, kind", FAULTS)
def test_fault_of_a_forked_script_is_told(starts, tmp_path, name, kind):
    verdict = forked(starts, tmp_path, name, kills=1, seed=3)
    assert names(verdict, name, kind), verdict


@pytest.mark.crash
def test_forked_script_without_a_fault_is_equal_after_kills(starts, tmp_path):
    verdict = forked(starts, tmp_path, "sound", kills=3)
    assert (verdict["equal"], verdict["step"], len(verdict["kills"])) == (True, 8, 3), verdict
    assert verdict["kills"][-1]["resumed_after"] > 0 and os.listdir(tmp_path) == []


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_ranks_of_torchrun_are_killed_and_resumed(tmp_path):
    code, verdict, said = drill(
        tmp_path, *TORCHRUN, DRILLED / "torch_ranks.py", options=["--kills", "1", "--until", "8"]
    )
    assert (code, verdict["equal"]) == (0, True), said
    assert verdict["kills"][0]["resumed_after"] > 0 and os.listdir(tmp_path) == []


@pytest.mark.campaign
@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["train", "out-of-core", "finetune", "first-light"])
def test_examples_are_equal_after_kills(tmp_path, what):
    """The examples of this repository, in a short form."""
    options = ["--kills", "2", "--until", "6"]
    if what == "finetune":
        pytest.importorskip("transformers")
        from tiny_folders import TEXT, write_folder

        folder, text = write_folder(tmp_path / "folder"), tmp_path / "text.txt"
        text.write_text(TEXT * 4)
        command = (
            HERE / "examples" / "finetune.py",
            folder,
            text,
            tmp_path / "run",
            "--steps",
            8,
            "--tokens",
            16,
        )
    elif what == "first-light":
        small = ["model.blocks=2", "model.width=32", "model.context=32", "train.steps=8"]
        sets = [part for each in small for part in ("--set", each)]
        command = ("-m", "holdfast", "train", HERE / "examples" / "first-light.toml", *sets)
    elif what == "train":
        command = (
            *TORCHRUN,
            HERE / "examples" / "elastic.py",
            "train",
            "--folder",
            tmp_path / "x",
            "--steps",
            8,
        )
    else:
        before = [
            sys.executable,
            *TORCHRUN,
            HERE / "examples" / "elastic.py",
            "train",
            "--folder",
            tmp_path / "x",
        ]
        subprocess.run([*map(str, before), "--steps", "2"], env=ENVIRONMENT, check=True, timeout=200)
        command = (HERE / "examples" / "elastic.py", "out-of-core", "--folder", tmp_path / "x", "--steps", 10)
    code, verdict, said = drill(tmp_path, *command, options=options)
    assert (code, verdict["equal"]) == (0, True), said
    assert not (tmp_path / "run").exists() and not (tmp_path / "x" / "ssd").exists()
