"""Linear layers in fp8 that stay packed: the bits of a layer whose weight was unpacked before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ModelNotSupported
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.model.quantised_layers import close_layers, open_layers, unpacked
from holdfast.offload.setup.block_measurement import measure
from training import differing, state_of, stored

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers.integrations import finegrained_fp8  # noqa: E402

from tiny_folders import from_fp8, in_fp8  # noqa: E402

TILES = [(8, 8), (16, 32), (48, 20), (128, 128), (1, 7)]


def layer(tile=(8, 8), sizes=(48, 32), dtype=torch.float32):
    """A layer in fp8 with a bias, frozen; and its weight in fp32."""
    torch.manual_seed(0)
    made = finegrained_fp8.FP8Linear(*sizes, block_size=tile, has_bias=True).requires_grad_(False)
    packed, grid = in_fp8(torch.randn(sizes[::-1]), tile)
    made.weight.data, made.weight_scale_inv.data = packed, grid
    made.bias = nn.Parameter(torch.randn(sizes[1], dtype=dtype), requires_grad=False)
    return made, from_fp8(packed, grid, tile)


def plain(made, weight, dtype=torch.float32):
    linear = nn.Linear(*weight.shape[::-1]).requires_grad_(False)
    linear.weight.data, linear.bias.data = weight.to(dtype), made.bias.data.clone()
    return linear


def computed(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return out.detach(), x.grad


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_element_is_multiplied_by_the_scale_of_its_tile(tile, dtype):
    packed, grid = in_fp8(torch.randn(40, 56), tile)
    assert torch.equal(unpacked(packed, grid, tile, dtype), from_fp8(packed, grid, tile).to(dtype))
    narrow = grid.bfloat16()
    assert torch.equal(unpacked(packed, narrow, tile, dtype), from_fp8(packed, narrow, tile).to(dtype))


def test_every_fp8_value_is_unpacked_exactly():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 256)
    one = torch.tensor(1.0)
    for dtype in (torch.bfloat16, torch.float16):
        found = unpacked(every, one, None, dtype).float()
        assert torch.equal(found.nan_to_num(7), every.float().nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 48), (48,)], ids=str)
def test_an_open_layer_has_the_bits_of_an_unpacked_one(shape, dtype):
    made, weight = layer(dtype=dtype)
    model, expected = nn.Sequential(made), nn.Sequential(plain(made, weight, dtype))
    open_layers(model)
    for each in (model, expected):
        each[0].bias.requires_grad_()
    x = torch.randn(shape, dtype=dtype)
    assert same(computed(model, x), computed(expected, x))
    assert torch.equal(model[0]._parameters["bias"].grad, expected[0].bias.grad)


def test_the_packed_weight_is_kept_for_the_backward_pass():
    made, _ = layer()
    model, kept = nn.Sequential(made), []
    open_layers(model)
    x = torch.randn(5, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        model(x)
    assert sorted(map(str, kept)) == ["torch.float32", "torch.float8_e4m3fn"]


def test_autocast_computes_as_in_an_unpacked_layer():
    made, weight = layer()
    model, expected, x = nn.Sequential(made), nn.Sequential(plain(made, weight)), torch.randn(5, 48)
    open_layers(model)
    found = []
    for each in (model, expected):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(computed(each, x))
    assert found[0][0].dtype == torch.bfloat16 and same(*found)


def test_a_closed_layer_is_as_before():
    made, weight = layer()
    model, values = nn.Sequential(made), {k: v.clone() for k, v in made.state_dict().items()}
    parameters = dict(model.named_parameters())
    for _ in range(2):
        open_layers(model)
        assert torch.equal(model[0].weight, weight) and isinstance(model[0], finegrained_fp8.FP8Linear)
        close_layers(model)
        assert type(made) is finegrained_fp8.FP8Linear
        now = dict(model.named_parameters())
        assert all(now[name] is parameter for name, parameter in parameters.items()) and len(now) == 3
        assert not any(vars(parameter) for parameter in now.values())
    assert differing(made.state_dict(), values) == []


class Blocks(nn.Module):
    """Two blocks that each hold a layer in fp8, or an unpacked one."""

    def __init__(self, packed, sizes=(48, 48)):
        super().__init__()
        self.first, self.last = nn.Linear(8, sizes[0]), nn.Linear(sizes[0], 4)
        self.layers = nn.ModuleList()
        for _ in range(2):
            made, weight = layer(sizes=sizes)
            narrow = nn.AdaptiveAvgPool1d(sizes[0]) if sizes[1] != sizes[0] else nn.Tanh()
            self.layers.append(nn.Sequential(made if packed else plain(made, weight), narrow))

    def forward(self, x):
        x = self.first(x)
        for each in self.layers:
            x = each(x)
        return self.last(x).square().mean()


def adapted(packed, sizes=(48, 48), **options):
    torch.manual_seed(3)
    model = Blocks(packed, sizes).requires_grad_(False)
    torch.manual_seed(4)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["layers.0.0", "layers.1.0"], **options)
    )


def of_adapters(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


@pytest.mark.parametrize("options", [{}, {"bias": "all"}], ids=str)
def test_adapters_of_a_model_in_memory_equal_those_on_unpacked_layers(tmp_path, options):
    batches = [torch.randn(3, 5, 8) for _ in range(2)]
    expected, model = adapted(False, **options), adapted(True, **options)
    model.load_state_dict(  # PEFT rounds the first values of adapters on such a layer to fp8
        {name: p.detach() for name, p in expected.named_parameters() if "lora_" in name}, strict=False
    )
    optimizer = of_adapters(expected)
    for _ in range(3):
        for batch in batches:
            (expected(batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with holdfast.offload(model, of_adapters(model), tmp_path / "run", precision="fp32") as engine:
        for _ in range(3):
            engine.step([(batch,) for batch in batches])
    names = {name for name, p in expected.named_parameters() if p.requires_grad}
    state = {k: v for k, v in state_of(expected, optimizer).items() if k.rpartition("/")[0] in names}
    assert len(state) >= 4 * 4 and differing(stored(tmp_path / "run"), state) == []
    assert not any(hasattr(module, "library_weight") for module in model.modules())


def test_a_layer_that_is_used_outside_of_its_block_is_refused(tmp_path):
    model = adapted(True)
    base = model.base_model.model.layers[0][0].base_layer
    hook = model.base_model.model.last.register_forward_pre_hook(lambda _, given: base(given[0]) and None)
    refused = r"layers\.0\.0\.base_layer\.weight was used (after \S+layers\.1|between steps)"
    with holdfast.offload(model, of_adapters(model), tmp_path / "run", precision="fp32") as engine:
        with pytest.raises(ModelNotSupported, match=refused):
            engine.evaluate([(torch.randn(3, 5, 8),)])
        with pytest.raises(ModelNotSupported, match=refused):
            base(torch.randn(3, 48))
        hook.remove()
        engine.step([(torch.randn(3, 5, 8),)])


def test_an_unpacked_weight_counts_in_the_memory_of_a_block():
    model = adapted(True, (48, 4096))
    open_layers(model)
    found = measure(model, find_blocks(model), (torch.randn(3, 5, 8),), torch.float32)
    assert found.block_bytes > 48 * 4096 * 4


def test_layers_that_cannot_be_opened_are_refused_by_name(tmp_path):
    static = finegrained_fp8.FP8Linear(16, 16, block_size=None, activation_scheme="static")
    grouped = finegrained_fp8.FP8GroupedLinear(8, 16, 2, block_size=(8, 8))
    merged = layer()[0]
    merged.weight.data = merged.weight.data.float()
    for made, said in ((static, "activation_scheme static"), (grouped, "into groups"), (merged, "float32")):
        with pytest.raises(ModelNotSupported, match=rf"^0 \({type(made).__name__}\) .*{said}"):
            open_layers(nn.Sequential(made))
    model = adapted(True)
    model.base_model.model.first = finegrained_fp8.FP8Embedding(16, 48)
    with pytest.raises(ModelNotSupported, match=r"first \(FP8Embedding\) is quantised.*in fp8"):
        holdfast.offload(model, of_adapters(model), tmp_path / "run")
    assert not (tmp_path / "run").exists()
