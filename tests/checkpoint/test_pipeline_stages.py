"""A rank that has several stages of a pipeline gives them as one model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput, ModelNotSupported
from holdfast.state.capture import PipelineStages
from holdfast.state.live_state import LiveState


class Stage(nn.Module):
    """Some layers of a model, by their numbers in it, and a table that each stage has."""

    def __init__(self, numbers, persistent=False):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in numbers})
        self.head = None
        self.register_buffer("table", torch.zeros(4), persistent=persistent)

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x + self.table


def begun():
    torch.manual_seed(0)
    stages = [Stage([0, 1]), Stage([4, 5])]
    return stages, [torch.optim.AdamW(stage.parameters(), lr=0.1) for stage in stages]


def train(stages, optimizers, checkpointer, until, added=0):
    while checkpointer.steps_done < until:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(checkpointer.steps_done))
        for stage in stages:
            if added:
                stage.table += added
            x = stage(x)
        x.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        checkpointer.step()


def state_of(stages):
    return [{**dict(stage.named_parameters()), **dict(stage.named_buffers())} for stage in stages]


@pytest.mark.filterwarnings("ignore:buffer .*table is registered with persistent=False")
def test_stages_continue_with_tables_of_their_own(tmp_path):
    for until in (3, 5):
        stages, optimizers = begun()
        with holdfast.Checkpointer(tmp_path / "cut", model=stages, optimizer=optimizers) as checkpointer:
            assert checkpointer.resume() == (0 if until == 3 else 3)
            train(stages, optimizers, checkpointer, until, added=1)
    whole, optimizers = begun()
    with holdfast.Checkpointer(tmp_path / "whole", model=whole, optimizer=optimizers) as checkpointer:
        checkpointer.resume()
        train(whole, optimizers, checkpointer, 5, added=1)
    for expected, found in zip(state_of(whole), state_of(stages), strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_replaced_module_takes_no_buffer_to_another_stage():
    """Names are looked for anew then; of two buffers with one name the first keeps it."""
    stages, optimizers = begun()
    state = LiveState(PipelineStages(stages), optimizers)
    assert [state.passing[name][0] for name in ("table", "1.table")] == stages
    stages[1].layers["5"] = nn.ReLU()
    state.follow_modules()
    assert [state.passing[name][0] for name in ("table", "1.table")] == stages


def test_stages_are_stored_by_the_names_of_the_whole_model(tmp_path):
    stages, optimizers = begun()
    with holdfast.Checkpointer(tmp_path, model=stages, optimizer=optimizers) as checkpointer:
        checkpointer.resume()
        train(stages, optimizers, checkpointer, 3)
    together = Stage([0, 1, 4, 5])
    layers = together.layers
    optimizers = [
        torch.optim.AdamW([*layers[a].parameters(), *layers[b].parameters()], lr=0.1) for a, b in ("01", "45")
    ]
    with holdfast.Checkpointer(tmp_path, model=together, optimizer=optimizers) as checkpointer:
        assert checkpointer.resume() == 3
    for stage in stages:
        for number, layer in stage.layers.items():
            assert torch.equal(layer.weight, layers[number].weight)


def test_stages_whose_tensors_have_one_name_are_refused(tmp_path):
    for stages in ([Stage([0]), Stage([0])], [Stage([0], persistent=True), Stage([1], persistent=True)]):
        optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in stages]
        with pytest.raises(ModelNotSupported, match="would both be stored as"):
            holdfast.Checkpointer(tmp_path / "run", model=stages, optimizer=optimizers)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", [[], [Stage([0]), "stage"], "stage", None])
def test_what_is_no_model_is_refused(tmp_path, model):
    optimizer = torch.optim.SGD(Stage([0]).parameters(), lr=0.1)
    with pytest.raises(BadInput, match="model is not a"):
        holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    assert not (tmp_path / "run").exists()
