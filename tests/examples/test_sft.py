"""The example with TRL trains, goes on where it was, and saves the adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from tiny_folders import write_folder, write_pairs

HERE = Path(__file__).parents[2]


def run(folder, pairs, out, steps):
    done = subprocess.run(
        [sys.executable, HERE / "examples" / "sft.py", folder, pairs, out, "--steps", str(steps)],
        env=os.environ | {"PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_it_goes_on_and_saves_the_adapter(tmp_path):
    folder, pairs = write_folder(tmp_path / "folder"), write_pairs(tmp_path / "pairs.jsonl")
    run(folder, pairs, tmp_path / "out", 2)
    done = run(folder, pairs, tmp_path / "out", 3)
    assert "continues after step 2" in done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
