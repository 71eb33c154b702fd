"""Folders that torchao has quantised to int8: adapters train on packed layers, with the bits of torchao's product."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import Damaged, ModelNotSupported
from holdfast.models.lora_adapters import set_magnitudes
from holdfast.offload.model.int8_layers import OpenInt8, open_int8, unpacked_int8
from training import differing, state_of, stored

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import tiny_folders  # noqa: E402
from support.adapter_steps import micro_batches, of_trained, plain_losses  # noqa: E402
from tiny_folders import as_int8, write_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")

STEPS = 4
MADE_BY_TORCHAO = Path(__file__).parents[1] / "golden" / "torchao_int8.safetensors"
"""Layers of torchao 0.18 by rows, by groups and of one scale, with what it computed (``make_torchao.py``)."""
ON_SSD = holdfast.Placement(
    params_on_host=0.0, optimizer_on_host=0.0, activations_on_host=0.0, recomputed_fraction=1.0
)


def real_layer(tensors, bias=None):
    """An open layer with the values of ``tensors``."""
    made = nn.Linear(*reversed(tensors["_weight_qdata"].shape), bias=bias is not None, device="meta")
    open_int8(made, tensors)
    for name, value in tensors.items():
        made._parameters[name] = nn.Parameter(value, requires_grad=False)
    if bias is not None:
        made._parameters["bias"] = nn.Parameter(bias)
    return made


@pytest.mark.parametrize("kind", ["rows", "groups", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_weights_have_the_bits_of_torchao(kind, dtype):
    golden = load_file(MADE_BY_TORCHAO)
    made = real_layer({n.removeprefix(f"{kind}."): v for n, v in golden.items() if n.startswith(f"{kind}._")})
    name = f"{kind}.{str(dtype).removeprefix('torch.')}"
    x = golden["x"].to(dtype).requires_grad_()
    out = made(x)
    out.backward(golden["gradient"].to(dtype))
    found = {"weight": unpacked_int8(*(part.data for part in made.parts()), dtype), "out": out.detach()}
    found["of_input"] = x.grad
    assert {
        key: torch.equal(value, golden[f"{name}.{key}"]) for key, value in found.items()
    } == dict.fromkeys(found, True)


def test_a_layer_is_kept_packed_for_its_backward_pass():
    tensors = tiny_folders.in_int8(torch.randn(6, 8), 8)
    made, kept = real_layer(dict(zip(("_weight_qdata", "_weight_scale"), tensors)), torch.ones(6)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        out = made(torch.randn(2, 3, 8, requires_grad=True))
    assert kept == [torch.int8, torch.float32] and out.shape == (2, 3, 6)
    out.sum().backward()
    assert torch.equal(made._parameters["bias"].grad, torch.full((6,), 6.0))


def adapted(model, **options):
    chosen = {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**chosen | options)).train()


def train(folder, run, steps, **options):
    """The losses of ``steps`` and the values of what is trained before them."""
    model, weights = holdfast.pretrained(folder)
    model = adapted(model, **options)
    if options.get("use_dora") and not run.exists():
        set_magnitudes(model, weights)
    with holdfast.offload(
        model, of_trained(model, fused=True), run, source=weights, precision="fp32", placement=ON_SSD
    ) as engine:
        assert engine.steps_done == steps[0]
        begun = engine.state_dict(trained=True)
        return [float(engine.step(micro_batches(step))) for step in steps], begun


def resident(folder):
    """The model in ``folder`` with its values, in memory."""
    model, _ = holdfast.pretrained(folder)
    for name, value in load_file(folder / "model.safetensors").items():
        path, _, end = name.rpartition(".")
        held = model.get_submodule(path)._parameters
        held[end] = nn.Parameter(value.to(held[end].dtype), requires_grad=False)
    model.config.use_cache = False
    return model


@pytest.mark.parametrize(
    ("group", "options"), [(None, {}), (8, {"use_dora": True})], ids=["rows", "groups, dora"]
)
@pytest.mark.slow
def test_adapters_equal_peft_on_the_same_layers_and_resume(tmp_path, group, options):
    folder = as_int8(write_folder(tmp_path / "plain"), tmp_path / "folder", group)
    losses, begun = train(folder, tmp_path / "run", range(2), **options)
    losses += train(folder, tmp_path / "run", range(2, STEPS), **options)[0]
    model = adapted(resident(folder), **options)
    assert sum(isinstance(each, OpenInt8) for each in model.modules()) == 3 * 7
    own = {name: p.detach().clone() for name, p in model.named_parameters() if "magnitude" in name}
    assert bool(own) == bool(options) and differing(begun, own) == []
    assert not model.load_state_dict(begun, strict=False).unexpected_keys
    optimizer = of_trained(model, fused=True)
    expected = plain_losses(model, optimizer, STEPS)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    state = {k: v for k, v in state_of(model, optimizer).items() if k.rpartition("/")[0] in trained}
    assert losses == pytest.approx(expected, rel=1e-6) and len(state) >= 3 * 7 * 2 * 4
    found = stored(tmp_path / "run")
    assert differing(found, state) == []
    kept = {
        name: value for name, value in load_file(folder / "model.safetensors").items() if "_qdata" in name
    }
    for name, value in kept.items():
        path, _, end = name.rpartition(".")
        assert differing(found, {f"base_model.model.{path}.base_layer.{end}/param": value}) == []


def changed(change):
    """``change`` gets the tensors and the metadata of the folder, and returns both."""

    def apply(folder):
        path = folder / "model.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors, metadata = change(load_file(path), metadata)
        save_file(tensors, path, metadata)

    return apply


UP = "model.layers.1.mlp.up_proj"


def described(**told):
    """What the metadata say of one weight, otherwise than they did."""

    def change(tensors, metadata):
        was = json.loads(metadata[f"{UP}.weight"])
        new = was | {k: v for k, v in told.items() if k in was}
        new["_data"] = was["_data"] | {k: v for k, v in told.items() if k not in was}
        return tensors, metadata | {f"{UP}.weight": json.dumps(new)}

    return changed(change)


def replaced(end, value):
    return changed(lambda tensors, metadata: (tensors | {f"{UP}._weight_{end}": value}, metadata))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (described(_type="Int4Tensor"), ModelNotSupported, f"{UP}.weight as .* of the class Int4Tensor"),
        (described(act_quant_kwargs={"_type": "X"}), ModelNotSupported, "inputs are quantised or scaled"),
        (described(_tensor_data_names=["qdata", "scale", "act_pre_scale"]), ModelNotSupported, "inputs are"),
        (described(dtype={"_type": "torch.dtype", "_data": "float16"}), ModelNotSupported, "of float16"),
        (described(block_size=7), ModelNotSupported, "in blocks of 7"),
        (changed(lambda tensors, _: (tensors, {"format": "pt"})), Damaged, "describe no quantised weight"),
        (replaced("zero_point", torch.ones(24, 1, dtype=torch.int8)), ModelNotSupported, "zero points of"),
        (replaced("scale", torch.ones(24, 5)), Damaged, rf"{UP} that make no int8 weight.*scales \[24, 5\]"),
        (replaced("qdata", torch.ones(24, 8, dtype=torch.int8)), Damaged, r"values \[24, 8\]"),
        (
            changed(lambda t, m: ({k: v for k, v in t.items() if k != f"{UP}._weight_scale"}, m)),
            Damaged,
            "make no int8 weight.*_weight_scale",
        ),
        (
            changed(
                lambda t, m: (t | {"model.embed_tokens._weight_qdata": t[f"{UP}._weight_qdata"].clone()}, m)
            ),
            ModelNotSupported,
            "22 weights that torchao has quantised, and 21 of them are linear layers",
        ),
    ],
)
def test_other_weights_of_torchao_are_refused_in_one_line(tmp_path, change, error, said):
    folder = as_int8(write_folder(tmp_path / "plain"), tmp_path / "folder")
    change(folder)
    with pytest.raises(error, match=said):
        holdfast.pretrained(folder)
