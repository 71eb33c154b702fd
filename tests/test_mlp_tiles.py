"""MLPs in tiles of tokens: the numbers of the whole, in memory that does not grow with the text."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast.errors import BadInput, ModelNotSupported
from holdfast.models.decoder import Decoder
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.setup.block_measurement import measure
from training import CONTEXT, VOCABULARY, adamw, batches, decoder, differing, state_of, stored

transformers = pytest.importorskip("transformers")


def trained(model, steps=3):
    """The losses and the state of a plain loop."""
    optimizer, losses = adamw(model, fused=True), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batches(step, 1)[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state_of(model, optimizer)


def test_the_gradients_are_those_of_ten_plain_lines():
    """Tiles from the last to the first, and the sum of what each gives."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    plain, input = copy.deepcopy(mlp), torch.randn(2, 11, 4, requires_grad=True)
    assert holdfast.tile_mlps(mlp, 5, modules=[mlp]) == 1
    output = mlp(input)
    rows, weights = input.detach().view(22, 4), torch.randn(22, 4)
    (output.view(22, 4) * weights).sum().backward()
    expected = torch.empty(22, 4)
    for start in (20, 15, 10, 5, 0):
        tile = rows[start : start + 5].clone().requires_grad_()
        (plain(tile) * weights[start : start + 5]).sum().backward()
        expected[start : start + 5] = tile.grad
    assert torch.equal(output.view(22, 4), torch.cat([plain(tile) for tile in rows.split(5)]))
    assert torch.equal(input.grad.view(22, 4), expected)
    for found, wanted in zip(mlp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad)


def test_short_inputs_have_the_bits_of_the_model_itself():
    losses, state = trained(decoder(blocks=2, dropout=0.1))
    model = decoder(blocks=2, dropout=0.1)
    assert holdfast.tile_mlps(model, 2 * CONTEXT) == 2
    found, after = trained(model)
    assert found == losses and differing(state, after) == []


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("options", [{}, {"recomputed_fraction": 0.0}])
def test_out_of_core_has_the_bits_of_a_loop_with_the_same_tiles(tmp_path, options, dropout):
    def tiled():
        model = decoder(blocks=3, dropout=dropout)
        holdfast.tile_mlps(model, 5)
        return model

    if dropout:  # its numbers are those of a loop that draws as the engine does
        runs = {}
        for name in ("one", "two"):
            model = tiled()
            with offloaded(model, tmp_path / name, **options) as engine:
                runs[name] = [engine.step(batches(step, 1)) for step in range(2)]
        assert runs["one"] == runs["two"]
        return
    losses, state = trained(tiled())
    model = tiled()
    with offloaded(model, tmp_path, **options) as engine:
        assert [engine.step(batches(step, 1)) for step in range(3)] == losses
    assert differing(stored(tmp_path), state) == []


def offloaded(model, directory, **placement):
    return holdfast.offload(
        model,
        adamw(model, fused=True),
        directory,
        precision="fp32",
        placement=holdfast.Placement(**placement),
    )


def test_models_of_transformers_are_near_to_what_they_compute_whole():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY,
        use_cache=False,
    )  # fmt: skip
    whole = transformers.LlamaForCausalLM(config)
    tiled = copy.deepcopy(whole)
    assert holdfast.tile_mlps(tiled, 3) == 2
    tokens = batches(0, 1)[0]["tokens"]
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (whole, tiled)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for found, expected in zip(tiled.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_the_predicted_memory_of_a_block_no_longer_grows_by_its_mlp():
    def workspace(context, tokens=0):
        config = replace(decoder().config, width=64, hidden=1024, context=context, blocks=2)
        model = Decoder(config)
        if tokens:
            holdfast.tile_mlps(model, tokens)
        shape = (1, context)
        sample = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        return measure(model, find_blocks(model), sample, torch.float32).block_bytes

    short, long = (workspace(context, 64) for context in (256, 1024))
    assert workspace(1024) - workspace(256) > 768 * 3 * 4 * 1024  # three values of the MLP a token
    assert long - short < 768 * 4 * 1024  # less than one


def test_a_module_whose_tokens_depend_on_one_another_is_refused():
    class Mixing(nn.Module):
        def forward(self, x):
            return x + x.mean(dim=0, keepdim=True)

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    for module, why in (
        (Mixing(), "gives another output for a part"),
        (Pair(), "does not return one tensor"),
    ):
        holdfast.tile_mlps(module, 4, modules=[module])
        with pytest.raises(ModelNotSupported, match=why):
            module(torch.randn(9, 3))
    mixing = Mixing()
    holdfast.tile_mlps(mixing, 4, modules=[mixing])
    with pytest.raises(ModelNotSupported, match="is not called with one tensor"):
        mixing(torch.randn(9, 3), None)


def test_bad_input_is_one_line():
    with pytest.raises(BadInput, match="Linear has no module named mlp"):
        holdfast.tile_mlps(nn.Linear(2, 2), 4)
    for tokens in (0, True, 2.0):
        with pytest.raises(BadInput, match="must be a positive integer"):
            holdfast.tile_mlps(decoder(), tokens)
    model = decoder()
    model.blocks[0].mlp.forward = lambda x: x
    with pytest.raises(ModelNotSupported, match=r"has set the forward of blocks\.0\.mlp"):
        holdfast.tile_mlps(model, 4)


def test_tiles_may_be_set_anew_and_go_with_a_copy():
    model = decoder(blocks=1)
    holdfast.tile_mlps(model, 4)
    twin = copy.deepcopy(model)
    assert twin.blocks[0].mlp.forward.module is twin.blocks[0].mlp
    assert holdfast.tile_mlps(model, 7) == 1 and model.blocks[0].mlp.forward.tokens == 7
    assert twin.blocks[0].mlp.forward.tokens == 4


def test_a_tile_inside_of_a_checkpoint_has_the_same_gradients():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))
    holdfast.tile_mlps(mlp, 4, modules=[mlp])
    grads = []
    for through in (mlp, lambda x: checkpoint(mlp, x, use_reentrant=False)):
        torch.manual_seed(1)
        mlp.zero_grad()
        through(torch.ones(10, 4, requires_grad=True)).square().sum().backward()
        grads.append([p.grad.clone() for p in mlp.parameters()])
    assert all(map(torch.equal, *grads))
