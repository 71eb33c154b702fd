"""Initial values of a model that was built empty are those that its own code gives it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ModelNotSupported
from support.grouped import grouped
from training import differing

transformers = pytest.importorskip("transformers")


def made_by_holdfast(make, root, **options) -> dict[str, torch.Tensor]:
    with holdfast.empty_parameters():
        model = make()
    with holdfast.offload(
        model, torch.optim.AdamW(model.parameters()), root, **grouped(dtype="fp32", **options)
    ) as engine:
        return engine.state_dict()


def gpt2(blocks: int = 8):
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=blocks, n_head=4, n_positions=64, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5():
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
    config.use_cache = False
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gpt2, t5], ids=["from the model above", "from the parent"])
def test_weights_are_as_widely_spread_as_in_an_ordinary_model(tmp_path, make):
    torch.manual_seed(0)
    ordinary, found = make().state_dict(), made_by_holdfast(make, tmp_path)
    for name, value in ordinary.items():
        if value.numel() > 100:
            assert float(found[name].std()) == pytest.approx(float(value.std()), rel=0.3), name


def test_a_blocks_values_depend_on_the_seed_and_the_block_alone(tmp_path):
    few, many = (made_by_holdfast(lambda n=n: gpt2(n), tmp_path / f"{n}") for n in (2, 5))
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(few[name], many[name])
    assert not torch.equal(few[name], made_by_holdfast(gpt2, tmp_path / "other", seed=1)[name])


def drawn(module):
    for parameter in module._parameters.values():
        if parameter is not None:
            nn.init.normal_(parameter)


@pytest.mark.parametrize("init", [None, drawn])
@pytest.mark.parametrize("tied", [True, False])
def test_values_do_not_depend_on_how_the_model_is_divided(tmp_path, tied, init):
    """Neither on what is streamed, nor on which modules are blocks, where these are the same."""
    found = {}
    for way in ("resident", "streamed", "one block"):
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=tied
        )
        with holdfast.empty_parameters():
            model = transformers.GPT2LMHeadModel(config)
            model.lm_head.bias = nn.Parameter(torch.empty(64))
        model.config.use_cache = False
        options = {"blocks": [model.transformer.h[1]]} if way == "one block" else {"embedding_and_head": way}
        optimizer = torch.optim.AdamW(model.parameters())
        with holdfast.offload(
            model, optimizer, tmp_path / way, init=init, **grouped(dtype="fp32", **options)
        ) as engine:
            found[way] = engine.state_dict()
    assert differing(found["streamed"], found["resident"]) == []
    others = {name: value for name, value in found["resident"].items() if ".h.0." not in name}
    assert len(others) > 10 and differing(found["one block"], others) == []


def test_real_parameters_of_other_units_are_left_alone(tmp_path):
    with holdfast.empty_parameters():
        model = gpt2(2)
    head = torch.randn(64, 32)
    model.transformer.wte.weight = model.lm_head.weight = nn.Parameter(head.clone())
    scale = torch.randn(32, 32)
    model.transformer.h[1].attn.c_proj.weight = nn.Parameter(scale.clone())
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.offload(model, optimizer, tmp_path, precision="fp32") as engine:
        found = engine.state_dict()
    assert torch.equal(found["lm_head.weight"], head)
    assert torch.equal(found["transformer.h.1.attn.c_proj.weight"], scale)


def test_the_buffers_of_a_module_with_two_names_are_given_by_both(tmp_path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.last = nn.BatchNorm1d(4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x).square().mean()

    model = Twice()
    names = list(model.state_dict())
    with holdfast.offload(
        model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, precision="fp32"
    ) as engine:
        found = engine.state_dict()
    assert sorted(found) == sorted(names)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, batch_first=True), 2, enable_nested_tensor=False
        ).layers


def test_attention_of_torch_is_initialised_as_its_constructor_does(tmp_path):
    found = made_by_holdfast(Attending, tmp_path)
    bound = (6 / (16 + 48)) ** 0.5
    weight = found["blocks.0.self_attn.in_proj_weight"]
    assert 0.9 * bound < float(weight.abs().max()) <= bound
    assert not found["blocks.0.self_attn.out_proj.bias"].any()


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gained() for _ in range(2))


def test_what_only_a_constructor_sets_is_asked_for(tmp_path):
    with pytest.raises(ModelNotSupported, match=r"Gained is on meta and has no reset_parameters.*init="):
        made_by_holdfast(Gains, tmp_path / "run")
    found = made_by_holdfast(Gains, tmp_path / "run", init=lambda module: nn.init.ones_(module.gain))
    assert torch.equal(found["blocks.1.gain"], torch.ones(4))
