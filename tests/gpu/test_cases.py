"""The engine on a device, beside the plain cases: models and options that people bring, and what is left afterwards.

Each case runs on CUDA (``-m gpu``), and where there is none, as far as it can be, on a device that is
played in Python, so that the case itself is known to be right.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import token_chunks
from holdfast.models.decoder import Decoder
from holdfast.offload.memory.residency import Residency
from holdfast.offload.model import embedding_gradients
from support.grouped import grouped
from training import CONTEXT, VOCABULARY, adamw, batches, decoder

transformers = pytest.importorskip("transformers")


def engine_of(directory, device, model=None, **options):
    model = model or decoder(blocks=3)
    given = {"dtype": "fp32", "sample": batches(0, 1)[0], "micro_batches": 2} | options
    optimizer = given.pop("optimizer", adamw)(model)
    return holdfast.offload(model, optimizer, directory, **grouped(device=device, **given))


def trained(directory, device, model=None, steps=2, data=batches, **options):
    """Losses of some steps, and what was trained."""
    with engine_of(directory, device, model, **options) as engine:
        losses = [engine.step(data(step, 2)) for step in range(steps)]
        return losses, engine.state_dict()


def close(one, other):
    """Two devices, whose kernels round differently."""
    return all(torch.allclose(one[name], other[name], atol=2e-3, rtol=1e-2) for name in other)


def test_model_works_after_close(tmp_path, device):
    model = decoder(blocks=3)
    trained(tmp_path, device, model)
    assert torch.isfinite(model(**batches(9, 1)[0]))


def test_model_that_begins_there_goes_back(tmp_path, device):
    model = decoder(blocks=3).to(device)
    there = [{name: value.to(device) for name, value in batch.items()} for batch in batches(0, 2)]
    with engine_of(tmp_path, device, model, sample=there[0]) as engine:
        assert engine._plan.memory is not None
        engine.step(there)
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    assert torch.isfinite(model(**there[0]).to("cpu"))


def of_lengths(step, count):
    length = CONTEXT - step % 5
    return [{name: value[:, :length].clone() for name, value in b.items()} for b in batches(step, count)]


def test_lengths_that_vary_take_bounded_memory(tmp_path, device):
    with engine_of(tmp_path, device) as engine:
        for step in range(10):
            engine.step(of_lengths(step, 2))
            engine.wait()
        pool, planned = engine._run.residency.pool, engine._plan.memory.pinned_bytes
        pages = 4096 * 3 * 2 * 4  # inputs here are smaller than a page
        assert pool.pinned_bytes <= 1.13 * planned + pages


def words(step, count):
    return [{"input_ids": b["tokens"], "labels": b["targets"]} for b in batches(step, count)]


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("adapted", [False, True], ids=["Llama", "LoRA"])
def test_transformers_train_there(tmp_path, device, adapted):
    def make():
        model = llama()
        if adapted:
            peft = pytest.importorskip("peft")
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
            model = peft.get_peft_model(model, config).train()
        return model

    def optimizer(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    options = {"data": words, "sample": words(0, 1)[0], "optimizer": optimizer}
    losses, state = trained(tmp_path / "there", device, make(), **options)
    expected, here = trained(tmp_path / "here", "cpu", make(), **options)
    assert losses == pytest.approx(expected, rel=1e-3) and close(state, here)


class InChunks(Decoder):
    """A decoder that always computes its loss in chunks."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return holdfast.chunked_cross_entropy(self.norm(x), self.head.weight, targets)


def test_gradients_in_parts_have_the_bits_of_resident_ones(tmp_path, device, monkeypatch):
    """Of a streamed embedding in two parts, and of a head in three, whose loss is in chunks of four tokens."""
    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", 4 * VOCABULARY)
    monkeypatch.setattr(token_chunks, "WORDS_PER_TILE", 8)
    monkeypatch.setattr(embedding_gradients, "EMBEDDED_AT_ONCE", 8 * VOCABULARY)
    names, own = [], Residency._collect_parts
    monkeypatch.setattr(Residency, "_collect_parts", lambda *args: names.append(args[3].name) or own(*args))
    found = {}
    for way in ("resident", "streamed"):
        model = decoder(blocks=2)
        model.__class__ = InChunks
        options = {"dtype": "bf16", "clip_norm": 0.5, "embedding_and_head": way}
        found[way] = trained(tmp_path / way, device, model, steps=1, **options)
    (losses, state), (expected, whole) = found["streamed"], found["resident"]
    assert losses == expected
    assert {name: (state[name] != whole[name]).sum().item() for name in whole} == dict.fromkeys(whole, 0)
    assert sorted(names) == ["embed.weight"] * 2 + ["head.weight"] * 2


def test_autocast_around_steps(tmp_path, device):
    with torch.autocast(device, torch.bfloat16):
        losses, _ = trained(tmp_path / "there", device, recomputed_fraction=0.5)
    expected, _ = trained(tmp_path / "here", "cpu")
    assert losses == pytest.approx(expected, rel=0.05)


def test_fp16_scales_its_loss(tmp_path, device):
    losses, _ = trained(tmp_path / "there", device, dtype="fp16")
    expected, _ = trained(tmp_path / "here", "cpu")
    assert losses == pytest.approx(expected, rel=0.05)


def test_mezo_moves_weights_there(tmp_path, device):
    options = {"optimizer": lambda model: holdfast.optim.MeZO(model.parameters(), lr=1e-3)}
    losses, state = trained(tmp_path / "there", device, **options)
    expected, here = trained(tmp_path / "here", "cpu", **options)
    assert losses == pytest.approx(expected, rel=1e-3) and close(state, here)


def test_automatic_budget_is_found(tmp_path, device):
    with engine_of(tmp_path, device, budget="auto") as engine:
        engine.step(batches(0, 2))
        assert engine._plan.memory.device_bytes > 0


def test_training_goes_on_beside_a_fork(tmp_path, device):
    """Workers of a loader are forks; pinned memory is not in them."""
    with engine_of(tmp_path / "there", device, params_on_host=1.0) as engine:
        losses = [engine.step(batches(0, 2))]
        child = os.fork()
        if child == 0:
            os._exit(0)
        losses.append(engine.step(batches(1, 2)))
        os.waitpid(child, 0)
        losses.append(engine.step(batches(2, 2)))
    expected, _ = trained(tmp_path / "here", "cpu", steps=3)
    assert losses == pytest.approx(expected, rel=1e-3)


def test_memory_of_the_device_is_given_back(tmp_path, cuda):
    """Nothing of an engine is left there once it is closed. torch keeps the workspaces of cuBLAS, one for each thread
    that has multiplied."""

    def allocated():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    before = allocated()
    trained(tmp_path, cuda)
    assert allocated() == before


def test_compiled_blocks_train_there(tmp_path, cuda):
    model = decoder(blocks=3)
    for block in model.blocks:
        block.compile()
    losses, _ = trained(tmp_path / "compiled", cuda, model)
    assert losses == pytest.approx(trained(tmp_path / "plain", cuda)[0], rel=1e-3)


def test_failed_registration_breaks_no_kernel(tmp_path, cuda):
    """The driver's own refusal: the same memory once more."""
    from holdfast import accelerators
    from holdfast.io.buffers import Buffer

    buffer, there = Buffer(1 << 20, "test"), torch.device("cuda")
    unpin = accelerators.pin(buffer.view, there)
    with pytest.raises(accelerators.CannotPin):
        accelerators.pin(buffer.view, there)
    assert torch.ones(4, device=there).sum().item() == 4
    unpin()
    buffer.free()


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_train_takes_the_device(tmp_path, cuda):
    text, recipe = tmp_path / "text", Path(__file__).parents[2] / "examples" / "first-light.toml"
    text.write_text("to be or not to be, that is the question. " * 400)
    sizes = [
        f"model.{k}={v}"
        for k, v in {"blocks": 2, "width": 16, "heads": 2, "kv_heads": 1, "context": 16}.items()
    ]
    settings = [
        f"run.dir={tmp_path / 'run'}",
        f"data.text={text}",
        "train.steps=4",
        "offload.device=cuda",
        *sizes,
    ]
    command("train", recipe, *(part for setting in settings for part in ("--set", setting)))
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert sum('"event": "step"' in line for line in lines) == 4 and any(
        '"device_bytes"' in line for line in lines
    )


def test_probe_measures_the_device(tmp_path, cuda):
    said = command("probe", "--dir", tmp_path, "--seconds", "4", "--device", "cuda")
    assert torch.cuda.get_device_name().split()[-1] in said
