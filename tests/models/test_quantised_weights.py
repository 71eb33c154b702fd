"""Folders that bitsandbytes has quantised, as models on meta whose layers stay packed."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, Damaged, ModelNotSupported
from holdfast.models.quantised_weights import unpacks_weight

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")

from safetensors.torch import load_file, save_file  # noqa: E402

import tiny_folders  # noqa: E402
from tiny_folders import QUANTISED, VOCABULARY, write_folder, write_quantised  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt", "ignore:`is_gradient_checkpointing`")


def adapted(model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def opened(folder, run):
    model, weights = holdfast.pretrained(folder)
    model = adapted(model)
    assert all(p.is_meta for p in model.parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, holdfast.offload(model, optimizer, run, source=weights, precision="fp32")


def micro_batches():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (2, 2, 10), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("make", [tiny_folders.llama, tiny_folders.qwen3, tiny_folders.llama_tied])
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.slow
def test_a_quantised_folder_trains_adapters_that_peft_loads(tmp_path, kind, make):
    folder = write_quantised(tmp_path, kind, make)
    losses = []
    for _ in range(2):
        model, weights = holdfast.pretrained(folder)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with holdfast.offload(model, optimizer, tmp_path / "run", source=weights, precision="fp32") as engine:
            losses += [engine.step(micro_batches()) for _ in range(2)]
            model.save_pretrained(tmp_path / "adapter", state_dict=engine.state_dict(trained=True))
            kept = engine.state_dict()
            loss = engine.evaluate(micro_batches())
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    back = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    values = back.state_dict()
    assert kept.keys() == values.keys()
    assert all(torch.equal(kept[name], value.to(kept[name].dtype)) for name, value in values.items())
    assert losses[3] < losses[0]
    back.train(
        kind != "int8"
    )  # in 4 bits an evaluation of such small layers fails without this library as well
    with torch.no_grad():
        found = sum(float(back(**batch).loss) for batch in micro_batches()) / 2
    assert float(loss) == pytest.approx(found, rel=1e-4)


@pytest.mark.slow
def test_packed_weights_keep_their_bytes_and_the_rest_its_dtype(tmp_path):
    folder = write_quantised(tmp_path, "nf4")
    _, engine = opened(folder, tmp_path / "run")
    with engine:
        entries = {entry.key: entry for unit in engine._run.units for f in unit.files for entry in f.entries}
    there = load_file(folder / "model.safetensors")
    packed = {name: value for name, value in there.items() if value.dtype == torch.uint8}
    assert len(packed) == 3 * 7 * 3  # a weight, its scales and its numbers
    for name, value in there.items():
        path, dot, end = name.partition(".weight")
        wrapped = f"base_model.model.{path}.base_layer{dot}{end}/param"
        found = entries.get(wrapped) or entries[f"base_model.model.{name}/param"]
        assert found.dtype == {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}[value.dtype]
        assert found.shape == tuple(value.shape)


@pytest.mark.slow
def test_numbers_of_the_run_count_and_not_those_of_the_folder(tmp_path):
    """A folder that was replaced by another one of the same shapes changes nothing in a run that has begun."""
    losses = []
    for change in (False, True):
        folder, run = write_quantised(tmp_path / str(change), "nf4"), tmp_path / f"run {change}"
        for step in range(2):
            if step and change:
                path = folder / "model.safetensors"
                tensors = load_file(path)
                for numbers in (value for name, value in tensors.items() if "quant_state" in name):
                    text = bytes(numbers.numpy()).decode()
                    digit = text.index(".", text.index("nested_offset")) + 2
                    numbers[digit] = ord("1" if text[digit] != "1" else "2")
                save_file(tensors, path)
            with opened(folder, run)[1] as engine:
                losses.append(float(engine.step(micro_batches())))
    assert losses[:2] == losses[2:]


@pytest.mark.slow
def test_what_unpacks_a_weight_is_missed_by_name(tmp_path):
    folder = write_quantised(tmp_path, "nf4")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({n: t for n, t in tensors.items() if "layers.1.mlp.up_proj.weight." not in n}, path)
    with pytest.raises(Damaged, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight\.absmax, which unpacks"):
        holdfast.pretrained(folder)
    for end in ("absmax", "nested_absmax", "nested_quant_map", "quant_map", "quant_state.bitsandbytes__nf4"):
        name = f"model.layers.1.mlp.up_proj.weight.{end}"
        save_file({n: t for n, t in tensors.items() if n != name}, path)
        with pytest.raises(Damaged, match=rf"lacks {re.escape(name)[:-4]}"):
            holdfast.pretrained(folder)
    for text in (b"{", b"[]", b'{"shape": [24, 16], "dtype": "nothing"}'):
        numbers = {name: torch.tensor([*text], dtype=torch.uint8)}
        save_file(tensors | numbers, path)
        with pytest.raises(
            Damaged, match=r"quant state of model\.layers\.1\.mlp\.up_proj that cannot be read"
        ):
            holdfast.pretrained(folder)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by gptq"),
        ({"quant_method": "gptq", "load_in_4bit": True}, "quantised by gptq"),
        ({"quant_method": "bitsandbytes"}, "in 4 or 8 bits"),
        ({"bits": 4}, "quantised by something unknown"),
        ("x", "quantised by x"),
    ],
)
def test_other_ways_to_quantise_are_refused_by_name(tmp_path, told, said):
    folder = write_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    with pytest.raises(ModelNotSupported, match=said):
        holdfast.pretrained(folder)


def test_without_the_library_one_error_says_what_to_install(tmp_path, monkeypatch):
    folder = write_quantised(tmp_path, "fp4")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BadInput, match="pip install bitsandbytes"):
        holdfast.pretrained(folder)


def test_names_of_what_unpacks():
    assert unpacks_weight("a.SCB") and unpacks_weight("a.weight.quant_state.bitsandbytes__nf4")
    assert not unpacks_weight("a.bias") and not unpacks_weight("model.weight_norm.scale")
    assert not unpacks_weight("conv.parametrizations.weight.original0")


@pytest.mark.slow
def test_a_model_of_a_folder_is_trained_again_after_its_run_was_closed(tmp_path):
    model, weights = holdfast.pretrained(write_quantised(tmp_path, "nf4"))
    model = adapted(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for run in ("first", "second", "first"):
        with holdfast.offload(model, optimizer, tmp_path / run, source=weights, precision="fp32") as engine:
            losses.append(engine.step(micro_batches()))
    assert losses[0] == losses[1] != losses[2]
