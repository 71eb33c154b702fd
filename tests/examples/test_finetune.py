"""The example of fine-tuning is its base script and six lines, and learns as that does."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.warm_python import environment_of, run_python  # noqa: E402
from tiny_folders import TEXT, write_folder  # noqa: E402

HERE = Path(__file__).parents[2]
BASE, OUT_OF_CORE = HERE / "examples" / "finetune_base.py", HERE / "examples" / "finetune.py"
MODULES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "holdfast.offload.api",
)


def code_of(path):
    """Lines after the docstring that say something."""
    return [line for line in path.read_text().split('"""', 2)[2].splitlines() if line.strip()]


def run(script, folder, text, out, steps):
    """The losses that it prints, by step."""
    words = [script, folder, text, out, "--steps", steps, "--tokens", "16"]
    done = run_python(*words, env=environment_of(), modules=MODULES, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in lines}


def test_it_is_the_base_script_and_six_lines():
    changes = list(difflib.ndiff(code_of(BASE), code_of(OUT_OF_CORE)))
    assert sum(line.startswith("+ ") for line in changes) == 6


@pytest.mark.slow
def test_it_learns_as_the_base_script_goes_on_and_gives_the_folder_back(tmp_path):
    folder, text = write_folder(tmp_path / "folder"), tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    base = run(BASE, folder, text, tmp_path / "base", 6)
    first = run(OUT_OF_CORE, folder, text, tmp_path / "run", 3)
    second = run(OUT_OF_CORE, folder, text, tmp_path / "run", 6)
    assert [*first, *second] == [*base] == [1, 2, 3, 4, 5, 6]
    assert list((first | second).values()) == pytest.approx(list(base.values()), rel=2e-3)  # in bf16
    verb = ["-m", "holdfast", "convert", tmp_path / "run", tmp_path / "out"]
    command = [*verb, "--to", "huggingface", "--model", folder]
    done = run_python(*command, env=environment_of(), timeout=100)
    assert done.returncode == 0, done.stderr
    found, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("out", "base")
    )
    began = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    moved = sum((expected[name] - began[name]).abs().sum() for name in expected)
    apart = sum((expected[name] - found[name]).abs().sum() for name in expected)
    assert apart < moved / 4
