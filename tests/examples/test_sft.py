"""The example with TRL trains, goes on where it was, and saves the adapter."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from support.warm_python import environment_of, run_python
from tiny_folders import write_folder, write_pairs

HERE = Path(__file__).parents[2]


def run(folder, pairs, out, steps):
    words = [HERE / "examples" / "sft.py", folder, pairs, out, "--steps", steps]
    done = run_python(*words, env=environment_of(HF_HUB_OFFLINE="1"), modules=["trl"], timeout=100)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_it_goes_on_and_saves_the_adapter(tmp_path):
    folder, pairs = write_folder(tmp_path / "folder"), write_pairs(tmp_path / "pairs.jsonl")
    run(folder, pairs, tmp_path / "out", 2)
    done = run(folder, pairs, tmp_path / "out", 3)
    assert "continues after step 2" in done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
