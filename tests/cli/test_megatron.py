"""Checkpoints of Megatron (synthetic ones) from the command line: shown, verified, compared, converted."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from formats.megatron_files import How, state, write

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


@pytest.fixture
def saved(tmp_path):
    """The same state as two worlds saved it, and the state."""
    of = state()
    write(tmp_path / "a", of, How(tp=2, stacked=True))
    write(tmp_path / "b", of, How(dp=3, optimizer="fully_sharded_model_space"))
    return tmp_path / "a", tmp_path / "b", of


def test_it_is_shown_with_its_step_and_its_command_line(saved, holdfast):
    shown = holdfast("show", saved[0])
    assert (
        shown.code == 0 and "megatron" in shown.out and "decoder.layers.3.mlp.linear_fc2.weight" in shown.out
    )
    told = json.loads(holdfast("show", saved[0], "--json").out)
    assert told["step"] == 7 and told["progress"]["extra"]["args"]["num_layers"] == 4


@pytest.mark.slow
def test_two_parallelisms_of_one_state_do_not_differ(saved, tmp_path, holdfast):
    a, b, _ = saved
    assert holdfast("diff", a, b).code == 0
    write(tmp_path / "c", state(seed=1), How())
    assert holdfast("diff", a, tmp_path / "c").code == 1


def test_damage_is_found_and_named(saved, holdfast):
    a, _, of = saved
    assert holdfast("verify", a).code == 0
    data = bytearray((a / "__0_0.distcp").read_bytes())
    weights = of.weights["decoder.layers.2.self_attention.linear_proj.weight"]
    data[data.index(bytes(weights[0, :8].view(torch.uint8).tolist()))] ^= 1
    (a / "__0_0.distcp").write_bytes(data)
    found = holdfast("verify", a)
    assert found.code == 1 and "__0_0.distcp" in found.out


@pytest.mark.slow
def test_a_run_made_of_it_is_the_same(saved, tmp_path, holdfast):
    a, b, _ = saved
    assert holdfast("convert", a, tmp_path / "run", "--to", "holdfast").code == 0
    assert holdfast("verify", tmp_path / "run").code == 0
    assert holdfast("diff", tmp_path / "run", b).code == 0


@pytest.mark.filterwarnings("default:.*the folder gets no config.json")
def test_a_hugging_face_folder_is_made_by_a_pack_with_the_numbers_of_the_checkpoint(
    saved, tmp_path, holdfast
):
    _, b, of = saved
    done = holdfast(
        "convert",
        b,
        tmp_path / "hf",
        "--to",
        "huggingface",
        "--rules",
        "megatron-to-llama",
        "--dtype",
        "bf16",
    )
    assert done.code == 0, done.err
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["model.embed_tokens.weight"].shape == (37, 16)
    gate, up = (found[f"model.layers.2.mlp.{half}_proj.weight"] for half in ("gate", "up"))
    assert torch.equal(torch.cat([gate, up]), of.weights["decoder.layers.2.mlp.linear_fc1.weight"])
