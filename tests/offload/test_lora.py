"""LoRA of PEFT out of core: the bits of a plain loop, nothing written or kept for what is frozen, resumed, exported."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import ModelNotSupported
from holdfast.offload.memory.device import open_device
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.setup.block_measurement import measure
from holdfast.offload.setup.model_timing import time_model
from training import differing, state_of, stored

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tiny_folders  # noqa: E402  (needs transformers)
from support.adapter_steps import micro_batches, of_trained, plain_losses  # noqa: E402
from tiny_folders import write_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:.*fan_in_fan_out")

STEPS = 4
EVERY = [tiny_folders.llama, tiny_folders.gpt_neox, tiny_folders.mixtral]


def adapted(model, **options):
    """With adapters on attention; ``init_lora_weights=False`` so that both of their matrices matter at once."""
    targets = ["q_proj", "v_proj"] if hasattr(model.config, "num_key_value_heads") else ["query_key_value"]
    chosen = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }
    return peft.get_peft_model(model, peft.LoraConfig(**chosen | options)).train()


def in_memory(make):
    torch.manual_seed(0)
    model = make()
    model.config.use_cache = False
    return adapted(model, init_lora_weights=False)


def rounded_llama():
    """One large enough to be told from fillers, with values of bf16."""
    return tiny_folders.llama(intermediate_size=4096).bfloat16()


def blocks_of(model):
    return model.base_model.model.model.layers


def plain_loop(model):
    optimizer = of_trained(model, fused=True)
    plain_losses(model, optimizer, STEPS)
    return state_of(model, optimizer)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("make", EVERY)
def test_adapters_equal_a_plain_loop_and_resume(tmp_path, make, schedule):
    expected = plain_loop(in_memory(make))
    for start, stop in ((0, 2), (2, STEPS)):
        model = in_memory(make)
        with holdfast.offload(
            model, of_trained(model), tmp_path, precision="fp32", schedule=schedule
        ) as engine:
            assert engine.steps_done == start
            for step in range(start, stop):
                engine.step(micro_batches(step))
    found = stored(tmp_path)
    assert differing(found, expected) == []
    frozen = {f"{name}/param" for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen and {name for name in found if name.rpartition("/")[0] + "/param" in frozen} == frozen


def test_nothing_is_written_for_what_is_frozen(tmp_path):
    """The bytes of a step are those of a model that has the adapters alone, in whole pages for each block."""
    folder = write_folder(tmp_path / "folder", lambda: tiny_folders.llama(intermediate_size=4096))
    model, weights = holdfast.pretrained(folder)
    model = adapted(model)
    every = holdfast.Placement(recomputed_fraction=1.0)
    with holdfast.offload(
        model, of_trained(model), tmp_path / "run", source=weights, placement=every
    ) as engine:
        engine.step(micro_batches(0))
        engine.wait()
        before = engine.traffic()
        engine.step(micro_batches(1))
        engine.wait()
        moved = {key: value - before.get(key, 0) for key, value in engine.traffic().items()}
        written = sum(value for (lane, _), value in moved.items() if lane == "ssd_write")
        read = sum(value for (lane, kind), value in moved.items() if kind == "load_params")
    block = next(iter(model.get_base_model().model.layers))
    frozen = 2 * sum(p.numel() for p in block.parameters() if not p.requires_grad)
    assert read > 2 * 3 * frozen * 0.8  # bf16, each of three blocks twice but the last
    assert written < frozen / 5


@pytest.mark.slow
def test_the_base_lies_in_the_run_as_in_its_folder(tmp_path):
    """A folder in bf16 takes two bytes a parameter, on the first day and after a resume, for the same bits."""
    made, losses = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        made[dtype] = write_folder(tmp_path / str(dtype), rounded_llama, dtype)
        losses[dtype], run = [], tmp_path / f"run {dtype}"
        for step in range(2):
            model, weights = holdfast.pretrained(made[dtype])
            torch.manual_seed(0)
            model = adapted(model)
            with holdfast.offload(model, of_trained(model), run, source=weights) as engine:
                losses[dtype].append(engine.step(micro_batches(step)))
                names = [unit.frozen_file.name for unit in engine._run.blocks]
        sizes = [
            sum(p.numel() for n, p in block.named_parameters() if "lora" not in n)
            for block in blocks_of(model)
        ]
        each = 2 if dtype is torch.bfloat16 else 4
        for name, count in zip(names, sizes):
            (file,) = (run / "data").glob(f"{name}.*.safetensors")
            assert (
                each * count <= file.stat().st_size < each * count + 2**17
            )  # a header, and matrices at 16 KiB
    assert losses[torch.float32] == losses[torch.bfloat16]


@pytest.mark.slow
def test_adapters_of_a_folder_that_is_never_in_memory_train_resume_and_are_exported(tmp_path):
    folder, run = write_folder(tmp_path / "folder", tiny_folders.mixtral), tmp_path / "run"
    for start in (0, 2):
        model, weights = holdfast.pretrained(folder)
        model = adapted(model)
        assert all(p.is_meta for p in model.parameters())
        with holdfast.offload(model, of_trained(model), run, source=weights, precision="fp32") as engine:
            assert engine.steps_done == start
            if start == 0:
                begun = engine.state_dict(trained=True)
            for step in range(start, start + 2):
                engine.step(micro_batches(step))
            trained = engine.state_dict(trained=True)
            every = engine.state_dict()
            model.save_pretrained(tmp_path / "adapter", state_dict=trained)
    assert trained.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    # as PEFT begins: B is zero, A is not
    assert all(value.any() == (".lora_A." in name) for name, value in begun.items())
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    back = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict()
    assert all(torch.equal(back[name], value) for name, value in every.items())
    assert all((back[name] != begun[name]).any() for name in begun)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_frozen_adapters_and_resized_embeddings_are_saved_as_in_memory(tmp_path):
    base = tiny_folders.llama(use_cache=False)
    base.name_or_path = str(write_folder(tmp_path / "folder", dtype=torch.float32))
    base.resize_token_embeddings(tiny_folders.VOCABULARY + 3)
    model = adapted(base, init_lora_weights=False)
    other = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model.add_adapter("other", other)
    model.set_adapter("other")
    model.save_pretrained(tmp_path / "expected")
    with holdfast.offload(model, of_trained(model), tmp_path / "run", precision="fp32") as engine:
        held: list[str] = []
        values = engine.state_dict(trained=True, keep=lambda name, value: held.append(name) or value)
        model.save_pretrained(tmp_path / "found", state_dict=values)
    assert held and {*held} <= values.keys()  # and not the rest of the base
    found, expected = (
        {str(path.relative_to(root)): load_file(path) for path in root.rglob("*.safetensors")}
        for root in (tmp_path / "found", tmp_path / "expected")
    )
    assert any("embed_tokens" in name for name in expected["adapter_model.safetensors"])
    assert [name for path, each in expected.items() for name in differing(found[path], each)] == []


def test_adapters_made_of_the_layers_values_are_refused_where_these_are_not_in_memory(tmp_path):
    model, weights = holdfast.pretrained(write_folder(tmp_path / "folder"))
    model = adapted(model, lora_dropout=0.0)
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ModelNotSupported, match=r"init_lora_weights = 'pissa'"):
        holdfast.offload(model, of_trained(model), tmp_path / "run", source=weights)


def test_adapters_of_another_kind_are_refused_where_the_layers_are_not_in_memory(tmp_path):
    model, weights = holdfast.pretrained(write_folder(tmp_path / "folder"))
    config = peft.AdaLoraConfig(total_step=10, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    with pytest.raises(
        ModelNotSupported, match=r"adapter 'default' is of the kind ADALORA, .* Use LoRA, or a"
    ):
        holdfast.offload(model, of_trained(model), tmp_path / "run", source=weights)
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] in ([], ["lock"])


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, [2]], ids=["all", "the last alone"])
def test_a_model_with_adapters_is_measured_and_timed_with_inputs_that_need_gradients(layers):
    """Nothing before the first block is trained, but what a block makes needs gradients in training."""
    torch.manual_seed(0)
    model = adapted(tiny_folders.llama(), layers_to_transform=layers)
    sample, blocks = micro_batches(0)[0], find_blocks(model)
    found = measure(model, blocks, sample, torch.float32)
    whole = tiny_folders.llama()
    usual = measure(whole, find_blocks(whole), sample, torch.float32)
    assert found.input_bytes == usual.input_bytes == 2 * 10 * 16 * 4
    assert found.block_flop == pytest.approx(usual.block_flop, rel=0.4)
    times = time_model(model, blocks, sample, torch.float32, open_device("cpu"), seconds=0.1)
    assert min(times.forward_seconds, times.backward_seconds, times.head_seconds) > 0


def test_the_base_keeps_its_dtype_without_the_folder(tmp_path):
    folder, run, sizes = write_folder(tmp_path / "folder", rounded_llama), tmp_path / "run", []
    for step in range(3):
        model, weights = holdfast.pretrained(folder)
        model = adapted(model)
        if step == 2:
            (folder / "model.safetensors").unlink()
        source = {} if step == 1 else {"source": weights}
        with holdfast.offload(model, of_trained(model), run, **source) as engine:
            engine.step(micro_batches(step))
        sizes.append({file.name: file.stat().st_size for file in (run / "data").glob("*.frozen*")})
    assert len(sizes[0]) == 4
    assert sizes[0] == sizes[1] == sizes[2]
