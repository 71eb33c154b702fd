"""Adapters on layers that bitsandbytes has quantised: the bits of a resident loop on the same kernels, read packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.cli.convert import ConvertOptions, convert
from holdfast.errors import BadInput, ModelNotSupported
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.model.quantised_layers import close_layers, open_layers
from holdfast.offload.setup.block_measurement import measure
from training import differing, state_of, stored

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")

import tiny_folders  # noqa: E402  (needs transformers)
from support.adapter_steps import micro_batches, of_trained, plain_losses  # noqa: E402
from tiny_folders import write_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:MatMul8bitLt")

STEPS = 4
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
KINDS = {
    "nf4 with quantised scales": FOUR | {"bnb_4bit_use_double_quant": True},
    "fp4": FOUR | {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
    "nf4": FOUR,
}


def is_open(module):
    return hasattr(module, "library_weight")


def layer(kind):
    """A layer with a bias, quantised."""
    torch.manual_seed(0)
    if kind == "int8":
        made = bitsandbytes.nn.Linear8bitLt(48, 32, has_fp16_weights=False)
    else:
        options = {
            "compress_statistics": kind.endswith("scales"),
            "quant_type": kind[:3],
            "compute_dtype": torch.float32,
        }
        made = bitsandbytes.nn.Linear4bit(48, 32, **options)
    return made.requires_grad_(False).to("cpu")


def computed(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return out.detach(), x.grad


def load(folder, kind, **sizes):
    """A tiny Llama, quantised as it is loaded."""
    if not folder.exists():
        write_folder(folder, lambda: tiny_folders.llama(**sizes), torch.float32)
    config = transformers.BitsAndBytesConfig(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.config.use_cache = False
    return model


def adapted(model, **options):
    torch.manual_seed(1)
    chosen = {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**chosen | options)).train()


def resident_loop(model):
    optimizer = of_trained(model, fused=True)
    plain_losses(model, optimizer, STEPS)
    state = state_of(model, optimizer)
    base = {f"{name}/param": value for name, value in model.state_dict().items()}
    return base | state


def opened(model, run, **options):
    """An engine for a model whose optimizer was given all parameters, frozen ones too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return holdfast.offload(model, optimizer, run, precision="fp32", **options)


def train(model, run, steps, **options):
    with opened(model, run, **options) as engine:
        assert engine.steps_done == steps[0]
        for step in steps:
            engine.step(micro_batches(step))


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_layer_computes_and_is_saved_as_before(kind):
    model, x = nn.Sequential(layer(kind), nn.ReLU()), torch.randn(5, 48)
    before, values = computed(model, x), {k: v.clone() for k, v in model.state_dict().items()}
    weight = model[0].weight
    for _ in range(2):
        open_layers(model)
        open_layers(model)
        assert dict(model.named_parameters()).keys() == values.keys() and is_open(model[0])
        assert isinstance(model[0], type(layer(kind)))
        assert all(torch.equal(one, other) for one, other in zip(computed(model, x), before))
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        close_layers(model)
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
        assert model[0].weight is weight and type(model[0]) is type(layer(kind))
        assert all(torch.equal(one, other) for one, other in zip(computed(model, x), before))
        assert model.state_dict().keys() == values.keys()


def test_an_open_layer_computes_with_the_memory_of_its_parameters():
    """What is read into that memory later counts, in every part of it."""
    for kind in KINDS:
        model, x = nn.Sequential(layer(kind)), torch.randn(5, 48)
        open_layers(model)
        before = computed(model, x)[0]
        for name, parameter in model.named_parameters():
            if name.endswith(("weight_format", "bias", "weight.quant_map")) or "quant_state" in name:
                continue
            kept = parameter.data.clone()
            parameter.data.copy_(
                parameter.data.flip(0) if "map" not in name and len(parameter) > 1 else 0.5 * parameter.data
            )
            assert not torch.equal(computed(model, x)[0], before), (kind, name)
            parameter.data.copy_(kept)
        assert torch.equal(computed(model, x)[0], before)


def test_a_weight_that_is_set_anew_closes_the_layer():
    model, other = nn.Sequential(layer("nf4")), nn.Sequential(layer("nf4"))
    open_layers(model)
    model[0].weight = model[0].weight  # as DoRA does
    assert is_open(model[0])
    with torch.no_grad():
        new = bitsandbytes.nn.Params4bit(torch.randn(32, 48), quant_type="nf4").to("cpu")
    model[0].weight = other[0].weight = new
    assert not is_open(model[0]) and len(list(model.parameters())) == 2
    x = torch.randn(5, 48)
    assert torch.equal(model(x), other(x))


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_adapters_equal_peft_on_the_resident_base_and_resume(tmp_path, kind):
    expected = resident_loop(adapted(load(tmp_path / "folder", kind)))
    for steps in (range(2), range(2, STEPS)):
        model = adapted(load(tmp_path / "folder", kind))
        train(model, tmp_path / "run", steps)
    found = stored(tmp_path / "run")
    assert differing(found, expected) == []
    assert found.keys() >= expected.keys()
    given_back = model.state_dict()
    assert all(torch.equal(given_back[name], expected[f"{name}/param"]) for name in given_back)


@pytest.mark.slow
def test_adapters_equal_in_other_schedules_too(tmp_path):
    ways = {}, {"schedule": "horizontal"}, {"placement": holdfast.Placement(recomputed_fraction=0.0)}
    for number, each in enumerate(ways):
        model = adapted(load(tmp_path / "folder", "nf4 with quantised scales"))
        train(model, tmp_path / str(number), range(2), **each)
    usual, *others = (stored(tmp_path / str(number)) for number in range(3))
    assert [differing(other, usual) for other in others] == [[], []]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_used_outside_of_its_block_is_refused(tmp_path, kind):
    model = adapted(load(tmp_path / "folder", kind))
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    seen = []

    def use(*_):
        seen.append((base.weight.dtype, base.weight.device.type))
        base(torch.ones(2, base.in_features))

    model.base_model.model.lm_head.register_forward_pre_hook(use)
    packed = torch.int8 if kind == "int8" else torch.uint8
    refused = r"layers\.0\.self_attn\.q_proj\.base_layer\.weight was used after \S+layers\.2"
    with pytest.raises(ModelNotSupported, match=refused), opened(model, tmp_path / "run") as engine:
        with pytest.raises(ModelNotSupported, match=refused):
            engine.evaluate(micro_batches(0))
        engine.step(micro_batches(0))
    assert seen == [(packed, "cpu")] * 2


@pytest.mark.slow
def test_dora_equals_peft_on_the_resident_base(tmp_path):
    """DoRA unpacks the weight itself, and puts it back."""
    options = {"use_dora": True, "init_lora_weights": True}
    expected = resident_loop(adapted(load(tmp_path / "folder", "nf4"), **options))
    train(adapted(load(tmp_path / "folder", "nf4"), **options), tmp_path / "run", range(STEPS))
    assert differing(stored(tmp_path / "run"), expected) == []


@pytest.mark.slow
def test_a_base_of_4_bits_is_read_as_such(tmp_path):
    """Two passes read half a byte and the scales each: at most 1.1 bytes a weight and step."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = adapted(load(tmp_path / "folder", "nf4 with quantised scales", **sizes), r=1)
    linear = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    weights = sum(each.in_features * each.out_features for each in linear)
    every = holdfast.Placement(recomputed_fraction=1.0)
    with opened(model, tmp_path / "run", placement=every) as engine:
        engine.step(micro_batches(0))
        engine.wait()
        before = engine.traffic()
        engine.step(micro_batches(1))
        engine.wait()
        read = {kind: value - before.get((lane, kind), 0) for (lane, kind), value in engine.traffic().items()}
        assert engine.preflight.parameters == sum(p.numel() for p in model.parameters()) + weights - sum(
            p.numel() for each in linear for p in each.parameters()
        )
        adapters = sum(unit.trained_copy_bytes for unit in engine._run.blocks)
    passes = 1.5  # the last of two blocks is read once
    assert passes * 0.5 * weights < read["load_params"] < passes * (0.55 * weights + adapters)


@pytest.mark.slow
def test_a_resumed_run_computes_with_its_own_base(tmp_path):
    """A run that is given another base of the same shapes later goes on with what it has."""
    kind = "nf4 with quantised scales"
    for number in range(2):
        train(adapted(load(tmp_path / "folder", kind)), tmp_path / f"run{number}", range(1))
    torch.manual_seed(9)
    other = adapted(load(tmp_path / "folder", kind))
    for module in other.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight.quant_state.absmax.fill_(7)
    losses = []
    for number, model in enumerate((other, adapted(load(tmp_path / "folder", kind)))):
        with opened(model, tmp_path / f"run{number}") as engine:
            losses.append(engine.step(micro_batches(1)))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_memory_of_packed_layers_is_predicted(tmp_path):
    """The largest weight is unpacked for a moment, so it counts."""
    for kind in ("nf4", "int8"):
        model = adapted(load(tmp_path / "folder", kind, intermediate_size=4096))
        open_layers(model)
        found = measure(model, find_blocks(model), micro_batches(0)[0], torch.float32)
        assert found.block_bytes > 16 * 4096 * 4


def test_what_cannot_be_streamed_is_refused_before_anything_is_written(tmp_path):
    run = tmp_path / "run"
    model = nn.Sequential(bitsandbytes.nn.Linear4bit(16, 16), nn.ModuleList([nn.Linear(4, 4)]))
    with pytest.raises(
        ModelNotSupported, match=r'^0 \(Linear4bit\) has not quantised its weight.*to\("cpu"\)'
    ):
        open_layers(model)
    assert not is_open(model[0])
    model = load(tmp_path / "folder", "int8")
    model.model.embed_tokens = bitsandbytes.nn.Embedding8bit(320, 16)
    with pytest.raises(
        ModelNotSupported, match=r"embed_tokens \(Embedding8bit\) is quantised.*in 4 or 8 bits"
    ):
        opened(model, run)
    model = adapted(load(tmp_path / "folder", "int8"))
    open_layers(model)
    next(p for name, p in model.named_parameters() if name.endswith("SCB")).requires_grad_()
    with pytest.raises(
        ModelNotSupported, match=r"SCB is packed and requires grad; quantised weights are frozen"
    ):
        opened(model, run)
    assert not run.exists()


def test_a_refused_model_is_as_before(tmp_path):
    model = adapted(load(tmp_path / "folder", "nf4"))
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters())

    def refuse(preflight):
        raise BadInput("no")

    for options in ({"order": "x"}, {"budget": "x"}, {"confirm": refuse}):
        with pytest.raises(BadInput):
            holdfast.offload(model, optimizer, tmp_path / "run", precision="fp32", **options)
        assert [name for name, _ in model.named_parameters()] == names
        assert not any(is_open(module) for module in model.modules())


def test_a_layer_that_was_packed_for_inference_is_refused():
    """The library rounds the scales as it packs a weight for the CPU, and puts some back in another order."""
    model = nn.Sequential(layer("nf4"))
    model[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ModelNotSupported, match=r"^0 \(Linear4bit\) was packed anew .*Load the model again"):
        open_layers(model)
    assert not is_open(model[0])


def test_a_closed_layer_has_the_attributes_that_it_had():
    model = nn.Sequential(layer("nf4"))
    model[0].support_avx512bf16_for_cpu, x = True, torch.randn(5, 48)
    before = computed(model, x)[0]
    open_layers(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), before) and not model[0].support_avx512bf16_for_cpu
    close_layers(model)
    assert model[0].support_avx512bf16_for_cpu and model[0].quant_state is model[0].weight.quant_state


def test_layers_may_share_a_weight():
    model, x = nn.Sequential(layer("nf4"), nn.Linear(32, 48), layer("nf4")), torch.randn(5, 48)
    model[2].weight = model[0].weight
    before = computed(model, x)
    open_layers(model)
    assert all(torch.equal(one, other) for one, other in zip(computed(model, x), before))
    close_layers(model)
    assert model[2].weight is model[0].weight
    assert all(torch.equal(one, other) for one, other in zip(computed(model, x), before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_in_another_dtype_leaves_the_bias_in_its_memory(kind, dtype):
    made = layer(kind)
    open_layers(made)
    made.compute_dtype, made.training = dtype, True
    made._parameters["bias"] = bias = nn.Parameter(torch.randn(32).bfloat16())
    memory, x = bias.data_ptr(), torch.randn(5, 48, requires_grad=True)
    made(x.to(dtype)).sum().backward()
    assert bias.data_ptr() == memory and bias.dtype == torch.bfloat16
    assert torch.equal(bias.grad, torch.full_like(bias, 5))


def test_quantised_weights_are_not_converted_to_another_dtype(tmp_path):
    train(adapted(load(tmp_path / "folder", "nf4")), tmp_path / "run", range(1))
    written = tmp_path / "all.safetensors"
    with pytest.raises(BadInput, match="--dtype bf16 would round the scales of quantised weights"):
        convert(str(tmp_path / "run"), written, ConvertOptions(to="safetensors", dtype="bf16"), as_json=True)
    assert not written.exists()
    convert(str(tmp_path / "run"), written, ConvertOptions(to="safetensors"), as_json=True)
    assert written.exists()


def test_a_resume_says_that_layers_compute_in_another_dtype(tmp_path):
    train(adapted(load(tmp_path / "folder", "nf4")), tmp_path / "run", range(1))
    other = adapted(load(tmp_path / "folder", "nf4"))
    for module in other.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.compute_dtype = torch.bfloat16
    said = r"compute_dtype of quantised layers was \['torch.float32'\] and is \['torch.bfloat16'\]"
    with pytest.warns(UserWarning, match=said):
        train(other, tmp_path / "run", range(1, 2))
