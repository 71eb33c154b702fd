"""Adapters are planned with the bytes that an engine counts for PEFT's on the same base."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.offload.model.model_parts import ModelParts
from holdfast.offload.model.quantised_layers import close_layers, open_layers
from holdfast.profiles import BASES, AdaptedModel, load_machine
from holdfast.profiles.profile_files import model_of_config
from holdfast.schedule.operation_lists import work_of
from holdfast.schedule.planner.training_setting import Method, Setting

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")

SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 3072, "vocab_size": 2048,
}  # fmt: skip


def quantised(model, base):
    """``model`` with the linear layers of its blocks in the format of ``base``."""
    if base == "fp8":
        finegrained_fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
        for name, layer in list(model.model.layers.named_modules()):
            if isinstance(layer, torch.nn.Linear):
                made = finegrained_fp8.FP8Linear(layer.in_features, layer.out_features, (128, 128))
                model.model.layers.set_submodule(name, made.requires_grad_(False))
        return model
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for block in model.model.layers:
        for name, layer in list(block.named_modules()):
            if not isinstance(layer, torch.nn.Linear):
                continue
            sizes = layer.in_features, layer.out_features
            if base == "nf4":
                made = bitsandbytes.nn.Linear4bit(
                    *sizes, bias=False, compress_statistics=True, quant_type="nf4"
                )
            else:
                made = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            made.load_state_dict({"weight": layer.weight.data})
            block.set_submodule(name, made.requires_grad_(False).to("cpu"))
    return model


@pytest.mark.parametrize("base", ["bf16", "fp8", "int8", "nf4"])
@pytest.mark.slow
def test_planned_bytes_are_those_of_the_engine(base):
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    if base != "bf16":
        model = quantised(model, base)
    model = peft.get_peft_model(model, peft.LoraConfig(r=64, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    open_layers(model)
    counted = ModelParts.of(model, optimizer, "bf16", None).work(None, False, update_workers=1, guesses=False)
    close_layers(model)

    profile = replace(model_of_config(config, "Llama"), sequence=64)
    adapted = AdaptedModel(profile=profile, rank=64, base=BASES[base])
    planned = work_of(
        Setting(machine=load_machine("rtx-4090"), model=adapted, method=Method(), micro_batches=1)
    )
    [block, _], [expected, _] = counted.blocks, planned.blocks
    assert block.elements == expected.elements
    for name in ("param_bytes", "trained_param_bytes", "state_bytes", "grad_bytes"):
        assert getattr(block, name) == pytest.approx(getattr(expected, name), rel=0.03), name
    assert counted.resident_param_bytes == pytest.approx(planned.resident_param_bytes, rel=0.01)
    assert (counted.resident_elements, planned.resident_elements) == (0, 0)
    assert counted.resident_grad_bytes == planned.resident_grad_bytes == 0
