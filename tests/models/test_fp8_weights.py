"""Folders in fp8 with scales of tiles: adapters train on packed layers, with the bits of the unpacked model."""

from __future__ import annotations

import json

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, Damaged, ModelNotSupported
from holdfast.models.lora_adapters import set_magnitudes
from training import differing, state_of, stored

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

import tiny_folders  # noqa: E402
from formats.test_experts import deepseek_v3, qwen3_moe  # noqa: E402
from support.adapter_steps import COUNT, micro_batches, of_trained, plain_losses  # noqa: E402
from tiny_folders import as_fp8, write_folder, write_quantised  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")

STEPS = 4
ON_SSD = holdfast.Placement(
    params_on_host=0.0, optimizer_on_host=0.0, activations_on_host=0.0, recomputed_fraction=1.0
)
KEPT = holdfast.Placement(params_on_host=1.0, optimizer_on_host=1.0, recomputed_fraction=0.0)


def adapted(model, **options):
    chosen = {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**chosen | options)).train()


def train(folder, run, steps, precision="fp32", adapter=None, **options):
    """The losses of ``steps`` and the values of the adapters before them."""
    model, weights = holdfast.pretrained(folder)
    model = adapted(model, **(adapter or {}))
    with holdfast.offload(
        model, of_trained(model, fused=True), run, source=weights, precision=precision, **options
    ) as engine:
        assert engine.steps_done == steps[0]
        begun = engine.state_dict(trained=True)
        return [float(engine.step(micro_batches(step))) for step in steps], begun


def resident_loop(folder, begun, steps=STEPS, **options):
    """The losses and the state of PEFT's own steps on the model that transformers unpacks from the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).float()
    model.config.use_cache = False
    model.config._experts_implementation = "eager"
    model = adapted(model, **options)
    assert not model.load_state_dict(begun, strict=False).unexpected_keys
    optimizer = of_trained(model, fused=True)
    losses = plain_losses(model, optimizer, steps)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    state = state_of(model, optimizer)
    return losses, {key: value for key, value in state.items() if key.rpartition("/")[0] in trained}


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("placement", [ON_SSD, KEPT, holdfast.Placement()], ids=["ssd", "host", "auto"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_folders.llama, {}),
        (tiny_folders.llama_tied, {"tile": None}),
        (tiny_folders.qwen3, {"scales": torch.bfloat16}),
        (tiny_folders.llama, {"scales": torch.float8_e8m0fnu, "scale_fmt": "ue8m0"}),
    ],
    ids=["fp32 scales", "one scale", "bf16 scales", "powers of two"],
)
@pytest.mark.slow
def test_adapters_equal_peft_on_the_unpacked_base_and_resume(tmp_path, make, options, placement):
    folder = as_fp8(write_folder(tmp_path / "plain", make), tmp_path / "folder", **options)
    losses, begun = train(folder, tmp_path / "run", range(2), placement=placement)
    losses += train(folder, tmp_path / "run", range(2, STEPS), placement=placement)[0]
    expected, state = resident_loop(folder, begun)
    assert losses == pytest.approx(expected, rel=1e-6) and len(state) == 3 * 7 * 2 * 4
    assert differing(stored(tmp_path / "run"), state) == []


@pytest.mark.slow
def test_dora_begins_and_trains_as_on_the_unpacked_base(tmp_path):
    folder = write_quantised(tmp_path, "fp8")
    model, weights = holdfast.pretrained(folder)
    model = adapted(model, use_dora=True)
    set_magnitudes(model, weights)
    with holdfast.offload(
        model,
        of_trained(model, fused=True),
        tmp_path / "run",
        source=weights,
        precision="fp32",
        placement=ON_SSD,
    ) as engine:
        begun = engine.state_dict(trained=True)
        losses = [float(engine.step(micro_batches(step))) for step in range(2)]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).float()
    fresh = {name: p for name, p in adapted(base, use_dora=True).named_parameters() if "magnitude" in name}
    assert len(fresh) == 3 * 7 and differing(begun, fresh) == []
    expected, state = resident_loop(folder, begun, 2, use_dora=True)
    assert losses == pytest.approx(expected, rel=1e-6) and differing(stored(tmp_path / "run"), state) == []


def test_bits_in_bf16_are_those_of_the_unpacked_base(tmp_path):
    """A frozen model in bf16 computes with what transformers rounds once from fp8 values and scales."""
    folder = write_quantised(tmp_path, "fp8")
    model, weights = holdfast.pretrained(folder)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).bfloat16().eval()
    with holdfast.offload(
        model, of_trained(model, fused=True), tmp_path / "run", source=weights, precision="bf16"
    ) as engine:
        found = float(engine.evaluate(micro_batches(0)))
    with torch.no_grad():
        expected = sum(float(base(**batch).loss) for batch in micro_batches(0)) / COUNT
    assert found == pytest.approx(expected, rel=1e-6)  # adapters begin as nothing


def test_packed_weights_and_scales_keep_their_bytes_and_the_rest_its_dtype(tmp_path):
    folder = write_quantised(tmp_path, "fp8")
    train(folder, tmp_path / "run", range(1), "bf16")
    found = stored(tmp_path / "run")
    there = load_file(folder / "model.safetensors")
    dtypes = [value.dtype for value in there.values()]
    assert dtypes.count(torch.float8_e4m3fn) == dtypes.count(torch.float32) == 3 * 7
    for name, value in there.items():
        path, dot, end = name.rpartition(".")
        wrapped = f"base_model.model.{path}.base_layer{dot}{end}/param"
        key = wrapped if wrapped in found else f"base_model.model.{name}/param"
        assert differing(found, {key: value}) == []


@pytest.mark.slow
def test_a_base_in_fp8_is_read_as_such(tmp_path):
    """One and a half passes read a byte of each weight, and its scales."""
    sizes = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 2}
    plain = write_folder(tmp_path / "plain", lambda: tiny_folders.llama(**sizes))
    model, weights = holdfast.pretrained(as_fp8(plain, tmp_path / "folder", (128, 128)))
    model = adapted(model, r=1)
    linear = [m for m in model.modules() if hasattr(m, "weight_scale_inv")]
    count = sum(each.in_features * each.out_features for each in linear)
    with holdfast.offload(
        model,
        of_trained(model, fused=True),
        tmp_path / "run",
        source=weights,
        placement=ON_SSD,
        precision="bf16",
    ) as engine:
        engine.step(micro_batches(0))
        engine.wait()
        before = engine.traffic()
        engine.step(micro_batches(1))
        engine.wait()
        read = {kind: value - before.get((lane, kind), 0) for (lane, kind), value in engine.traffic().items()}
        adapters = sum(unit.trained_copy_bytes for unit in engine._run.blocks)
    assert len(linear) == 14
    assert 1.5 * count < read["load_params"] < 1.5 * (1.03 * count + adapters)


def test_a_saved_adapter_loads_on_the_folder(tmp_path):
    folder = write_quantised(tmp_path, "fp8")
    model, weights = holdfast.pretrained(folder)
    model = adapted(model)
    with holdfast.offload(
        model, of_trained(model, fused=True), tmp_path / "run", source=weights, precision="fp32"
    ) as engine:
        engine.step(micro_batches(0))
        model.save_pretrained(tmp_path / "adapter", state_dict=engine.state_dict(trained=True))
        loss = float(engine.evaluate(micro_batches(1)))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).float()
    back = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        found = sum(float(back(**batch).loss) for batch in micro_batches(1)) / COUNT
    assert loss == pytest.approx(found, rel=1e-6)


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{UP}_scale_inv"), rf"lacks {UP}_scale_inv, which unpacks"),
        (without(UP), rf"lacks {UP}, which unpacks"),
        (
            lambda tensors: tensors | {f"{UP}_scale_inv": torch.ones(3, 3)},
            r"scales of model\.layers\.1\.mlp\.up_proj that cannot be read.*scales \[3, 3\].*not \[3, 2\]",
        ),
        (
            lambda tensors: tensors | {f"{UP}_scale_inv": torch.ones(3, 2, dtype=torch.uint8)},
            r"scales of model\.layers\.1\.mlp\.up_proj that cannot be read.*torch\.uint8",
        ),
        (
            lambda tensors: tensors | {UP: torch.ones(24, 16, dtype=torch.int8)},
            r"scales of model\.layers\.1\.mlp\.up_proj that cannot be read.*torch\.int8, not \[24, 16\]",
        ),
    ],
)
def test_tensors_that_make_no_layer_are_refused_by_name(tmp_path, change, said):
    folder = write_quantised(tmp_path, "fp8")
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(Damaged, match=said):
        holdfast.pretrained(folder)


@pytest.mark.parametrize(
    ("told", "error", "said"),
    [
        ({"activation_scheme": "static"}, ModelNotSupported, "scale their inputs in the static way"),
        ({"fmt": "e5m2"}, ModelNotSupported, "fp8 weights of the kind e5m2"),
        (
            {"weight_block_size": [128]},
            BadInput,
            r"weight_block_size must be two sizes of at least 1, not \[128\]",
        ),
        ({"weight_block_size": [0, 8]}, BadInput, "weight_block_size must be two sizes"),
    ],
)
def test_other_fp8_is_refused_by_name(tmp_path, told, error, said):
    folder = as_fp8(write_folder(tmp_path / "plain"), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= told
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=said):
        holdfast.pretrained(folder)


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("make", [deepseek_v3, qwen3_moe])
def test_experts_stay_packed_and_adapters_beside_them_equal_peft(tmp_path, make):
    """Published one by one, held by one tensor of a layer, and unpacked one by one again."""
    folder = as_fp8(write_folder(tmp_path / "plain", make), tmp_path / "folder", (4, 8))
    run, options = tmp_path / "run", {"target_modules": ["o_proj"]}
    losses, begun = train(folder, run, range(2), placement=ON_SSD, adapter=options)
    losses += train(folder, run, range(2, STEPS), placement=ON_SSD, adapter=options)[0]
    expected, state = resident_loop(folder, begun, **options)
    assert losses == pytest.approx(expected, rel=1e-6) and differing(stored(run), state) == []
    found = stored(run)
    fused = [name for name, value in found.items() if value.dim() == 3 and "experts" in name]
    assert fused and all(name.endswith(("proj/param", "_scale_inv/param")) for name in fused)
    [first] = [name for name in fused if name.endswith("layers.1.mlp.experts.down_proj/param")]
    one = load_file(folder / "model.safetensors")["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert found[first].dtype == torch.float8_e4m3fn
    assert torch.equal(found[first][3].view(torch.uint8), one.view(torch.uint8))


def wider_tiles(plain, folder):
    return as_fp8(plain, folder, (16, 8))


def experts_in_bf16(plain, folder):
    as_fp8(plain, folder)
    path = folder / "model.safetensors"
    there = load_file(plain / "model.safetensors")
    save_file(
        {n: there[n] if ".experts." in n and n in there else v for n, v in load_file(path).items()}, path
    )
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [(wider_tiles, "tiles of .16, 8. do not divide 8 rows"), (experts_in_bf16, "in torch.bfloat16, not")],
)
def test_experts_that_cannot_be_read_are_refused_by_name(tmp_path, make, said):
    plain = write_folder(tmp_path / "plain", qwen3_moe)
    with pytest.raises(Damaged, match=rf"experts of model\.layers\.0\.mlp\.experts that.*{said}"):
        holdfast.pretrained(make(plain, tmp_path / "folder"))
