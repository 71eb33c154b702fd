"""``convert``: from the command line, with what it says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast as library


@pytest.fixture
def trained(tmp_path):
    """A run of three steps in records, and its model."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with library.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(3):
            model(torch.randn(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
    return tmp_path / "run", model


def test_the_newest_step_is_exported_with_what_was_left_out(trained, tmp_path, holdfast):
    run, model = trained
    result = holdfast("convert", run, tmp_path / "hf", "--to", "huggingface")
    assert result.code == 0 and "2 tensors of" in result.out and "6 tensors of the optimizer" in result.out
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_tensors_that_are_not_of_the_model_are_not_said_to_be_of_the_optimizer(tmp_path, holdfast):
    path = tmp_path / "a.pt"
    torch.save({"model": nn.Linear(6, 4).state_dict(), "noise": torch.zeros(1 << 19)}, path)
    result = holdfast("convert", path, tmp_path / "hf", "--to", "huggingface")
    assert result.code == 0, result.err
    assert "parameters and buffers alone: 1 tensor of neither model nor optimizer\n" in result.out


def test_json_says_files_and_bytes(trained, tmp_path, holdfast):
    result = holdfast("convert", trained[0], tmp_path / "one.safetensors", "--to", "safetensors", "--json")
    found = json.loads(result.out)
    assert found["tensors"] == 8 and found["files"] == [str(tmp_path / "one.safetensors")]
    assert found["bytes"] == (tmp_path / "one.safetensors").stat().st_size
    assert holdfast("diff", trained[0], tmp_path / "one.safetensors").code == 0


@pytest.mark.parametrize("to", ["holdfast", "dcp"])
def test_there_and_back_every_tensor_is_the_same(trained, tmp_path, holdfast, to):
    assert holdfast("convert", trained[0], tmp_path / "a", "--to", to).code == 0
    assert holdfast("convert", tmp_path / "a", tmp_path / "b", "--to", "holdfast").code == 0
    assert holdfast("verify", tmp_path / "b").code == 0
    assert holdfast("diff", trained[0], tmp_path / "b").code == 0


def test_rules_give_other_names(trained, tmp_path, holdfast):
    (tmp_path / "rules.toml").write_text("version = 1\n[[rule]]\nmatch = '(.*)'\nrename = 'inner.{$1}'\n")
    result = holdfast(
        "convert", trained[0], tmp_path / "hf", "--to", "huggingface", "--rules", tmp_path / "rules.toml"
    )
    assert result.code == 0, result.err
    assert sorted(load_file(tmp_path / "hf" / "model.safetensors")) == ["inner.bias", "inner.weight"]


def test_copies_that_differ_are_told_before_a_folder_loses_them(tmp_path, holdfast):
    pytest.importorskip("transformers")
    from tiny_folders import llama, write_folder

    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        torch.save({"w": torch.full((2,), 1.0 * rank)}, tmp_path / f"ranks/{rank}.pt")
    text = "version = 1\nmesh = {tp = 2}\naxes = {tp = 'replicate'}\nfiles = {match = '(?P<tp>\\d+)[.]pt'}\n"
    (tmp_path / "ranks/rules.toml").write_text(text + "[[rule]]\nmatch = 'w'\n")
    folder = write_folder(tmp_path / "folder", llama)
    result = holdfast(
        "convert", tmp_path / "ranks", tmp_path / "out", "--to", "huggingface", "--model", folder
    )
    assert result.code == 1 and "the copies of w/param differ" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "onnx"], "--to onnx is not one of"),
        (["--to", "holdfast", "--dtype", "bf16"], "--dtype is for exports"),
        (["--to", "huggingface", "--dtype", "int3"], "--dtype int3 is not one of"),
        (["--to", "safetensors"], "does not end in .safetensors"),
        (["--to", "deepspeed"], "needs --stage"),
        (["--to", "huggingface", "--rules", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_is_one_line_with_nothing_written(trained, tmp_path, holdfast, arguments, text):
    result = holdfast("convert", trained[0], tmp_path / "out", *arguments)
    assert result.code == 2 and text in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_destination_that_holds_a_run_is_refused(trained, holdfast):
    result = holdfast("convert", trained[0], trained[0], "--to", "holdfast")
    assert result.code == 2 and "holds a run already" in result.err
