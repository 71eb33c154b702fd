"""``holdfast train`` with ``[quantization]``: bitsandbytes packs a folder, and adapters train on what it packed."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from holdfast.config import QuantizationConfig
from holdfast.models import quantise_folder as packing
from support.adapter_runs import logits, losses, stored_adapter, train_adapters
from training import differing

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import tiny_folders  # noqa: E402  (needs transformers)
from formats.test_experts import qwen3_moe  # noqa: E402
from tiny_folders import TEXT, write_folder, write_quantised, write_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:MatMul8bitLt",
    "ignore:.is_gradient_checkpointing",
)

WAYS = {
    "nf4": QuantizationConfig(bits=4),
    "fp4": QuantizationConfig(bits=4, type="fp4", double=False),
    "int8": QuantizationConfig(bits=8),
}


@pytest.fixture
def train(holdfast, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 12)
    how = ("lora.rank=4", "lora.dropout=0.1")
    return lambda run, folder, steps, *sets: train_adapters(holdfast, text, run, folder, steps, *how, *sets)


def of(how):
    sets = [f"quantization.bits={how.bits}"]
    return (
        sets
        if how.bits == 8
        else [*sets, f"quantization.type={how.type}", f"quantization.double={how.double}".lower()]
    )


def tensors_in(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("kind", WAYS)
def test_the_folder_is_packed_as_transformers_packs_it(tmp_path, monkeypatch, kind):
    """In several files, and again from the start where it was interrupted."""
    theirs = write_quantised(tmp_path, kind)
    monkeypatch.setattr(packing, "FILE_BYTES", 4000)
    packing.quantise_folder(tmp_path / "plain", tmp_path / "ours", WAYS[kind])
    expected = tensors_in(theirs)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert differing(tensors_in(tmp_path / "ours"), expected) == []
    assert tensors_in(tmp_path / "ours").keys() == expected.keys()
    told, here = (json.loads((each / "config.json").read_text()) for each in (theirs, tmp_path / "ours"))
    assert here["quantization_config"] == told["quantization_config"]

    first = min((tmp_path / "ours").glob("*.safetensors"))
    first.write_bytes(b"torn")
    packing.quantise_folder(tmp_path / "plain", tmp_path / "ours", WAYS[kind])
    assert first.read_bytes() == b"torn"
    (tmp_path / "ours/config.json").unlink()
    packing.quantise_folder(tmp_path / "plain", tmp_path / "ours", WAYS[kind])
    assert differing(tensors_in(tmp_path / "ours"), expected) == []


@pytest.mark.parametrize("changed", ["settings", "folder"])
def test_packed_weights_of_something_else_are_made_again(tmp_path, changed):
    plain, ours, how = write_folder(tmp_path / "plain"), tmp_path / "ours", WAYS["int8"]
    packing.quantise_folder(plain, ours, how)
    if changed == "settings":
        how = WAYS["nf4"]
    else:
        shutil.rmtree(plain)
        write_folder(plain, tiny_folders.qwen3)
    packing.quantise_folder(plain, ours, how)
    packing.quantise_folder(plain, tmp_path / "fresh", how)
    assert differing(tensors_in(ours), tensors_in(tmp_path / "fresh")) == []
    assert tensors_in(ours).keys() == tensors_in(tmp_path / "fresh").keys()
    assert (ours / "config.json").read_bytes() == (tmp_path / "fresh/config.json").read_bytes()


@pytest.mark.slow
def test_a_failed_start_leaves_no_base_of_other_settings(tmp_path, train):
    """The plan that does not fit is refused when the base is packed already."""
    folder, run = write_folder(tmp_path / "folder"), tmp_path / "run"
    result = train(run, folder, 1, *of(WAYS["int8"]), "offload.host_budget=1MiB")
    assert result.code == 2 and "budget is 1.0 MiB" in result.err, result.err
    result = train(run, folder, 1, *of(WAYS["nf4"]))
    assert result.code == 0, result.err
    assert json.loads((run / "base/config.json").read_text())["quantization_config"]["load_in_4bit"]


def test_transposed_weights_are_refused_by_name(tmp_path):
    folder = write_folder(tmp_path / "folder", tiny_folders.gpt2)
    from holdfast.errors import ModelNotSupported

    with pytest.raises(ModelNotSupported, match=r"attn\.c_attn keeps its weight transposed"):
        packing.quantise_folder(folder, tmp_path / "ours", WAYS["nf4"])
    assert not (tmp_path / "ours").exists()


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_packs_its_base_resumes_and_is_exported(tmp_path, train, holdfast, kind):
    folder, run, whole = write_folder(tmp_path / "folder"), tmp_path / "run", tmp_path / "whole"
    for steps in (1, 3):
        result = train(run, folder, steps, *of(WAYS[kind]))
        assert result.code == 0, result.err
        assert (f"quantising {folder} to" in result.out) == (steps == 1)
    assert train(whole, folder, 3, *of(WAYS[kind])).code == 0
    assert losses(run) == losses(whole)
    assert holdfast("verify", run).code == 0
    assert (
        len(list((run / "data").glob("*.reference"))) >= 3
    )  # the base is there once, and the commits refer to it

    assert holdfast("convert", run, tmp_path / "adapter", "--to", "peft").code == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(
        run / "base", dtype=torch.float32, device_map="cpu"
    )
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    values = {f"{name}/param": value for name, value in loaded.named_parameters() if "lora_" in name}
    kept = stored_adapter(run)
    assert values and differing(kept, values) == []

    result = holdfast(
        "convert", run, tmp_path / "merged", "--to", "huggingface", "--merge", "--dtype", "fp32"
    )
    assert result.code == 0, result.err
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        run / "base", dtype=torch.float32, device_map="cpu"
    )
    plain = plain.dequantize(torch.float32).float()
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    assert differing(merged.state_dict(), expected.state_dict()) == []
    assert torch.equal(logits(merged.eval()), logits(expected.eval()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8", "torchao", "experts"])
def test_a_folder_that_is_packed_already_trains_adapters(tmp_path, train, holdfast, kind):
    made = ("fp8", qwen3_moe) if kind == "experts" else (kind,)
    folder, run = write_quantised(tmp_path, *made), tmp_path / "run"
    write_tokenizer(folder)
    sets = {
        "fp8": ["lora.dora=true"],
        "torchao": ["lora.dora=true"],
        "experts": ["lora.targets=[q_proj,v_proj]"],
    }.get(kind, [])
    for steps in (1, 2) if kind == "nf4" else (1,):
        result = train(run, folder, steps, *sets)
        assert result.code == 0, result.err
    assert holdfast("convert", run, tmp_path / "adapter", "--to", "peft").code == 0
    dtype, more = (torch.float32, ["--dtype", "fp32"]) if kind == "int8" else (torch.bfloat16, [])
    result = holdfast("convert", run, tmp_path / "merged", "--to", "huggingface", "--merge", *more)
    assert result.code == 0, result.err
    _, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told.values())
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    if kind == "nf4":  # test_a_run_packs_its_base_resumes_and_is_exported compares it
        return
    there = folder if kind != "torchao" else tmp_path / "plain"  # fp8 is unpacked by transformers on a CPU
    base = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=dtype, device_map="cpu")
    if kind == "int8":
        base = base.dequantize(dtype).float()
    packed = load_file(folder / "model.safetensors")
    for name in re.findall(r"(\S+?)\._weight_qdata", " ".join(packed)):
        value = tiny_folders.from_int8(packed[f"{name}._weight_qdata"], packed[f"{name}._weight_scale"])
        base.get_submodule(name).weight.data = value.bfloat16()
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
    assert differing(found.state_dict(), expected.state_dict()) == []


@pytest.mark.parametrize(
    ("kind", "sets", "said"),
    [
        ("fp8", ["quantization.bits=4"], "are quantised already. Leave [quantization] out"),
        ("nf4", ["lora.dora=true"], "which bitsandbytes has packed"),
        (
            "torchao",
            ["lora.modules_to_save=[q_proj]", "lora.targets=[v_proj]"],
            "packed values are not trained",
        ),
    ],
)
def test_what_a_packed_folder_cannot_is_one_line(tmp_path, train, kind, sets, said):
    folder = write_quantised(tmp_path, kind)
    write_tokenizer(folder)
    result = train(tmp_path / "run", folder, 1, *sets)
    assert result.code == 2 and said in result.err and not (tmp_path / "run").exists()
