"""Verbs on states of others work, and so begin, without torch: importing it takes longer than most of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from formats.deepspeed_files import random_state, write

SOURCE = Path(__file__).parents[2] / "src"
CODE = "import sys; sys.modules['torch'] = None; from holdfast.cli.main import main; main()"
GROUPS = [{"a.weight": (5, 3), "a.bias": (5,)}, {"b.weight": (7,)}]


def holdfast(*arguments):
    """The verb in a process that cannot import torch: what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[1, 3])
def saved(request, tmp_path_factory):
    """A folder of ZeRO, and the same state as each other format that needs no torch, as the verb wrote it."""
    root = tmp_path_factory.mktemp(f"stage{request.param}")
    write(root / "ds", random_state(GROUPS), request.param, 2)
    holdfast("convert", root / "ds", root / "run", "--to", "holdfast")
    holdfast("convert", root / "ds", root / "one.safetensors", "--to", "safetensors")
    holdfast("convert", root / "run", root / "universal", "--to", "deepspeed", "--stage", request.param)
    (root / "same.toml").write_text("version = 1\n[[rule]]\nmatch = '(.*)'\n")
    to_folder = ["--to", "huggingface", "--rules", root / "same.toml"]
    holdfast("convert", root / "universal", root / "folder", *to_folder)
    return root


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("name", ["ds", "run", "one.safetensors", "universal", "folder"])
def test_show_and_verify(saved, name):
    assert "a.weight" in holdfast("show", saved / name)
    holdfast("verify", saved / name)


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("name", ["run", "one.safetensors", "universal"])
def test_what_was_written_is_what_was_read(saved, name):
    assert holdfast("diff", saved / "ds", saved / name).splitlines()[2].startswith("equal: ")
