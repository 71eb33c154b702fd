"""A folder's weights are never whole in memory: not when they are taken up, not when they are trained."""

from __future__ import annotations

import shutil

import pytest
import torch

from support.warm_python import TESTS, environment_of, run_python

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.crash

MIB = 1024**2
MODULES = ("transformers.models.llama.modeling_llama", "holdfast.models.pretrained", "holdfast.offload.api")


def write(folder, layers):
    """Layers of 2.2 million parameters, a file for about every four; bytes."""
    config = transformers.LlamaConfig(
        hidden_size=384,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=6,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def growth(folder, run):
    done = run_python(
        TESTS / "folder_run.py", folder, run, env=environment_of(), modules=MODULES, timeout=100
    )
    assert done.returncode == 0, done.stderr
    before, peak = map(int, done.stdout.split())
    return peak - before


def test_a_folder_four_times_as_deep_takes_no_more_memory(tmp_path):
    sizes = {layers: write(tmp_path / f"{layers}", layers) for layers in (10, 40)}
    taken = {layers: growth(tmp_path / f"{layers}", tmp_path / f"run-{layers}") for layers in sizes}
    shutil.rmtree(tmp_path)
    added = sizes[40] - sizes[10]
    assert added > 120 * MIB
    assert taken[40] - taken[10] < added / 5, (sizes, taken)
