"""Profiles of model folders count the parameters that transformers makes of their configuration."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import ConfigError
from holdfast.profiles import load_model
from holdfast.profiles.profile_files import GATED, PLAIN

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 160, "vocab_size": 300,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
HEADS = {"head_dim": 16}


def config_of(kind):
    options = dict(SIZES)
    if kind == "gpt2":
        del options["intermediate_size"]
    elif kind != "gpt_neox":
        options |= GROUPED | (HEADS if kind.startswith(("gemma", "qwen3")) else {})
    return transformers.AutoConfig.for_model(kind, **options)


@pytest.mark.parametrize("kind", GATED + PLAIN)
def test_parameters_are_those_of_the_model(tmp_path, kind):
    config = config_of(kind)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    profile = load_model(str(tmp_path))
    assert profile.parameters == pytest.approx(count, rel=0.01)
    assert (profile.blocks, profile.sequence, profile.vocabulary) == (3, 64, 300)


@pytest.mark.parametrize("kind", GATED + PLAIN)
def test_linear_layers_are_those_of_the_model(tmp_path, kind):
    config = config_of(kind)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    shapes = [
        module.weight.shape if isinstance(module, linear[1]) else module.weight.shape[::-1]
        for name, module in model.named_modules()
        if isinstance(module, linear) and ".0." in name
    ]
    assert sorted(load_model(str(tmp_path)).linear_layers) == sorted(tuple(shape) for shape in shapes)


def test_another_architecture_is_refused_by_name(tmp_path):
    transformers.MixtralConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"mixtral.*TOML file"):
        load_model(str(tmp_path))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no configuration"):
        load_model(str(tmp_path))
