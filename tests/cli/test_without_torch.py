"""Verbs on states of others work, and so begin, without torch: importing it takes longer than most of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from formats.deepspeed_files import random_state, write

SOURCE = Path(__file__).parents[2] / "src"
CODE = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from holdfast.cli.main import main
said = []
for words in json.loads(sys.argv[1]):
    sys.argv, out = ["holdfast", *words], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, words
    said.append(out.getvalue())
print(json.dumps(said))
"""
GROUPS = [{"a.weight": (5, 3), "a.bias": (5,)}, {"b.weight": (7,)}]


def holdfast(*verbs):
    """What each verb prints, in a process that cannot import torch."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(verbs, default=str)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_others_are_converted_shown_verified_and_compared(tmp_path, stage):
    """A folder of ZeRO, and the same state as each other format that needs no torch, as the verb writes it."""
    zero, run, one, universal, folder = (
        tmp_path / name for name in ("ds", "run", "one.safetensors", "universal", "folder")
    )
    write(zero, random_state(GROUPS), stage, 2)
    (tmp_path / "same.toml").write_text("version = 1\n[[rule]]\nmatch = '(.*)'\n")
    every = [zero, run, one, universal, folder]
    said = holdfast(
        ["convert", zero, run, "--to", "holdfast"],
        ["convert", zero, one, "--to", "safetensors"],
        ["convert", run, universal, "--to", "deepspeed", "--stage", str(stage)],
        ["convert", universal, folder, "--to", "huggingface", "--rules", tmp_path / "same.toml"],
        *(["show", each] for each in every),
        *(["verify", each] for each in every),
        *(["diff", zero, each] for each in (run, one, universal)),
    )
    assert all("a.weight" in text for text in said[4:9])
    assert all(text.splitlines()[2].startswith("equal: ") for text in said[-3:])
