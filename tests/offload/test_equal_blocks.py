"""Of equal blocks one is traced, and the trace finds what it finds where each is traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.setup import block_measurement
from holdfast.offload.setup.block_measurement import MeasuredBlocks, measure
from holdfast.offload.setup.equal_calls import call_form, output_maker

WIDTH = 8


class Layer(nn.Module):
    """A block that holds its own place, and a setting that may differ from block to block."""

    def __init__(self, place: int, inner: int, power: float = 1.0) -> None:
        super().__init__()
        self.place, self.power, self.sizes = place, power, {"inner": [inner]}
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = F.gelu(self.up(x)) * mask
        return x + self.down(inner**self.power if self.power != 1 else inner), mask


class Model(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(16, WIDTH), nn.ModuleList(layers)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x, mask = self.embedding(ids), ids.unsqueeze(-1) > 0
        for layer in self.layers:
            x, mask = layer(x, mask)
        return {"loss": x.square().mean()}


def traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[MeasuredBlocks, list[int]]:
    """Return what the trace found, and the blocks whose forward it ran without keeping their graph."""
    ran: list[int] = []
    forward = block_measurement._Probe._forward

    def noted(self, index, args, kwargs, keep):
        ran.append(index)
        return forward(self, index, args, kwargs, keep)

    with monkeypatch.context() as patched:
        patched.setattr(block_measurement._Probe, "_forward", noted)
        ids = torch.zeros(2, 4, dtype=torch.int64)
        found = measure(model, find_blocks(model), {"ids": ids}, torch.float32)
    return found, ran


def differing(what: str) -> Model:
    """Return a model of six blocks; the fourth, or the third and the fourth, are not like the others."""
    model = Model([Layer(place, 12) for place in range(6)])
    if what == "a setting":
        model.layers[3] = Layer(3, 12, power=2.0)
    elif what == "a size":
        model.layers[3] = Layer(3, 20)
    elif what == "frozen":
        model.layers[3].requires_grad_(False)
    elif what == "in evaluation":
        model.layers[3].up.eval()
    elif what == "a hook":
        model.layers[3].up.register_forward_hook(lambda module, args, output: output * 1.0 * output)
    elif what == "a forward inside":
        gelu = model.layers[3].up.forward
        model.layers[3].up.forward = lambda x: gelu(x) * gelu(x)
    elif what == "compiled":
        model.layers[3].compile(backend="eager")
    elif what == "a forward of its own":
        own = model.layers[3].forward
        model.layers[3].forward = lambda x, mask: own(x * x, mask)
    elif what == "a container":
        model.layers[3].sizes["inner"] = [12, 12]
    return model


CASES = {
    "none": [0],
    "a setting": [0, 3],
    "a size": [0, 3],
    "frozen": [0, 3],
    "in evaluation": [0, 3],
    "a hook": [0, 3],
    "a forward of its own": [0, 3],
    "a forward inside": [0, 3],
    "compiled": [0, 3],
    "a container": [0, 3],
}


@pytest.mark.parametrize(("what", "expected"), CASES.items())
def test_one_of_equal_blocks_is_traced(
    what: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = differing(what)
    found, ran = traced(model, monkeypatch)
    assert ran == expected
    monkeypatch.setattr(block_measurement, "call_form", lambda *call: None)
    each, all_of_them = traced(model, monkeypatch)
    assert all_of_them == [0, 1, 2, 3, 4]
    assert found == each
    as_others = {"none", "in evaluation", "compiled", "a container"}
    assert len(set(found.activation_bytes[:5])) == (1 if what in as_others else 2)


def test_blocks_after_a_streamed_embedding_are_equal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = differing("none")
    blocks = find_blocks(model)
    streamed = replace(
        blocks,
        modules=(model.embedding, *blocks.modules),
        names=("embedding", *blocks.names),
        embeddings=1,
    )
    monkeypatch.setattr(f"{__name__}.find_blocks", lambda model: streamed)
    _, ran = traced(model, monkeypatch)
    assert ran == [0, 1]


def test_a_blocks_place_is_no_difference_and_any_other_number_is() -> None:
    def form(layer: Layer, index: int) -> object:
        return call_form(layer, index, (torch.zeros(2),), {})

    assert form(Layer(1, 12), 1) == form(Layer(2, 12), 2)
    assert form(Layer(1, 12), 1) != form(Layer(4, 12), 2)
    assert form(Layer(1, 12), 1) != call_form(Layer(1, 12), 1, (torch.zeros(3),), {})
    x = torch.zeros(2)
    same, other = (call_form(Layer(1, 12), 1, args, {}) for args in ((x, x), (x, torch.zeros(2))))
    assert same != other


def test_an_output_that_is_an_input_stays_one() -> None:
    x, mask = torch.zeros(2, 3).t(), torch.ones(2)
    made = output_maker((x * 2, mask, None, 3), [x, mask])
    assert made is not None
    arguments = [torch.zeros(2, 3).t(), torch.ones(2)]
    new, given, nothing, three = made(arguments)
    assert (new.shape, new.stride()) == (x.shape, (x * 2).stride())
    assert given is arguments[1]
    assert (nothing, three) == (None, 3)
    assert output_maker(object(), [x]) is None
