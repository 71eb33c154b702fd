"""Out-of-core training gives the bits of an ordinary loop, whatever stays where and in whichever order."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import nn

import holdfast
from combined import one_in
from plain_loops import PLACEMENTS, STEPS, check, plain_loop
from support.grouped import grouped
from training import VOCABULARY, batches, decoder, differing, read_atoms, state_of, stored


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "num_micro_batches, placement, schedule, clip_norm",
    one_in(3, [1, 2, 3, 5], PLACEMENTS, ["vertical", "horizontal"], [None, 0.5]),
)
def test_steps_have_every_bit_of_a_plain_loop(tmp_path, num_micro_batches, placement, schedule, clip_norm):
    check(tmp_path, STEPS, num_micro_batches, clip_norm, schedule=schedule, **PLACEMENTS[placement])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_dropout_draws_what_a_plain_loop_draws_under_keyed_rng(tmp_path, schedule):
    check(tmp_path, STEPS, 3, 0.5, dropout=0.2, schedule=schedule, **PLACEMENTS["mixed"])
    assert differing(read_atoms(tmp_path), stored(tmp_path)) == []
    assert plain_loop(3, 0.5, dropout=0.2)[0] != plain_loop(3, 0.5)[0]


class Encoder(nn.Module):
    """PyTorch's own encoder layers, whose kernels depend on what requires grad."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 3).layers

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torchs_own_encoder_layers_have_every_bit(tmp_path, placement, schedule):
    torch.manual_seed(0)
    model = Encoder()
    twin = deepcopy(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
    for step in range(3):
        made = [model(**batch) for batch in batches(step, 2)]
        for loss in made:
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in made) / 2)
    model.eval()
    with torch.no_grad():
        evaluated = sum(model(**batch).item() for batch in batches(3, 2)) / 2
    options = {"schedule": schedule, **PLACEMENTS[placement]}
    with holdfast.offload(
        twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), tmp_path, **grouped(dtype="fp32", **options)
    ) as engine:
        assert [engine.step(batches(step, 2)) for step in range(3)] == losses
        assert engine.evaluate(batches(3, 2)) == evaluated
    assert differing(stored(tmp_path), state_of(model, optimizer)) == []


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "fused": False}),
    (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.RAdam, {"lr": 1e-2}),
    (torch.optim.Adamax, {"lr": 1e-2}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {"lr": 1e-2}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_elementwise_optimizer_has_its_own_bits(tmp_path, kind, options):
    model = decoder(blocks=2)
    optimizer = kind(model.parameters(), **options)
    for step in range(8):  # RAdam changes its mind after five
        for batch in batches(step, 2):
            (model(**batch) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = state_of(model, optimizer)
    model = decoder(blocks=2)
    with holdfast.offload(
        model, kind(model.parameters(), **options), tmp_path, precision="fp32", clipping=0.5
    ) as engine:
        for step in range(8):
            engine.step(batches(step, 2))
    found = stored(tmp_path)
    assert differing(found, expected) == []
    assert {name for name in found if name not in expected} <= {
        f"{n}/step" for n, _ in model.named_parameters()
    }


@cache
def plain_bf16_loop():
    """bf16 parameters compute; fp32 masters are stepped with gradients summed in fp32."""
    model, losses = decoder(dropout=0.1), []
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, fused=True)
    with holdfast.keyed_rng(model) as keys:
        for step in range(STEPS):
            for name, p in model.named_parameters():
                p.data = masters[name].detach().bfloat16()
            total = 0.0
            for m, batch in enumerate(batches(step, 3)):
                keys.at(step, m)
                loss = model(**batch)
                (loss / 3).backward()
                total += loss.item()
                for name, p in model.named_parameters():
                    held = masters[name].grad
                    masters[name].grad = p.grad.float() if held is None else held + p.grad
                    p.grad = None
            torch.nn.utils.clip_grad_norm_(masters.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / 3)
    state = {f"{name}/param": p.detach() for name, p in masters.items()}
    for name, p in masters.items():
        state |= {f"{name}/{slot}": value for slot, value in optimizer.state[p].items()}
    return losses, state


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_bf16_computes_with_a_copy_of_fp32_masters_and_sums_gradients_in_fp32(tmp_path, schedule, placement):
    losses, expected = plain_bf16_loop()
    model = decoder(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.offload(
        model, optimizer, tmp_path, **grouped(clip_norm=0.5, schedule=schedule, **PLACEMENTS[placement])
    ) as engine:
        assert [engine.step(batches(step, 3)) for step in range(STEPS)] == losses
    assert differing(stored(tmp_path), expected) == []
    assert all(p.dtype == torch.float32 for p in model.parameters())
