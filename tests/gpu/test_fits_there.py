"""An engine on a device beside a plain loop that computes on it and steps on the host: optimizers, kinds of
adapters, what comes out after training; and the memory that was planned."""

from __future__ import annotations

import pytest
import torch

import holdfast
from named_optimizers import OPTIMIZERS
from plain_loops import PLACEMENTS
from support.grouped import grouped
from training import batches, decoder, differing, state_of, stored

transformers = pytest.importorskip("transformers")

from gpu.conftest import ON_CUDA  # noqa: E402
from gpu.test_cases import SIZES, llama, words  # noqa: E402
from tiny_folders import write_folder, write_quantised  # noqa: E402

STEPS = 4
PLAYED = pytest.param("played", marks=pytest.mark.campaign)
"""tests/offload shows the same on the CPU."""


@pytest.fixture(params=[ON_CUDA] if torch.cuda.is_available() else [PLAYED])
def device(request):
    if request.param == "played":
        request.getfixturevalue("played")
    return request.param


def plain_loop(make, optimizer_of, device, data=batches, steps=STEPS):
    """Losses, the model of the host, its optimizer, and the model on the device."""
    host, there = make(), make().to(device)
    optimizer, losses = optimizer_of(host), []
    for step in range(steps):
        found = []
        for batch in data(step, 2):
            out = there(**{name: value.to(device) for name, value in batch.items()})
            loss = out if isinstance(out, torch.Tensor) else out.loss
            (loss / 2).backward()
            found.append(loss.item())
        losses.append(sum(found) / 2)
        pairs = [
            (a, b) for a, b in zip(host.parameters(), there.parameters(), strict=True) if b.grad is not None
        ]
        for on_host, on_device in pairs:
            on_host.grad, on_device.grad = on_device.grad.cpu(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for on_host, on_device in pairs:
                on_device.copy_(on_host)
    return losses, host, optimizer, there


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_the_host_with_gradients_of_the_device(tmp_path, device, name):
    losses, host, optimizer, _ = plain_loop(lambda: decoder(blocks=3), OPTIMIZERS[name], device)
    found = []
    for steps, way in ((range(2), "mixed"), (range(2, STEPS), "host")):
        model = decoder(blocks=3)
        options = grouped(dtype="fp32", device=device, **PLACEMENTS[way])
        with holdfast.offload(model, OPTIMIZERS[name](model), tmp_path, **options) as engine:
            found += [engine.step(batches(step, 2)) for step in steps]
    assert found == losses
    assert differing(stored(tmp_path), state_of(host, optimizer)) == []


ADAPTERS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "a whole head": {"modules_to_save": ["lm_head"]},
    "biases, by rank": {"bias": "all", "use_rslora": True},
}


def adapted(**options):
    peft = pytest.importorskip("peft")
    given = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(llama(), peft.LoraConfig(**given, **options)).train()


def fused(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_a_kind_have_the_bits_of_a_plain_loop(tmp_path, device, kind):
    if kind == "DoRA" and device == "played":
        device = "cpu"  # what is played loses the shape of an operation that DoRA needs

    def make():
        return adapted(**ADAPTERS[kind])

    losses, host, _, there = plain_loop(make, fused, device, words)
    model = make()
    options = grouped(dtype="fp32", device=device, **PLACEMENTS["mixed"])
    with holdfast.offload(model, fused(model), tmp_path, **options) as engine:
        found = [engine.step(words(step, 2)) for step in range(STEPS)]
        state, trained = engine.state_dict(), engine.state_dict(trained=True)
        evaluated = engine.evaluate(words(9, 2))
        prompt = words(8, 1)[0]["input_ids"][:, :4]
        text = engine.generate(prompt, 3, temperature=0)
    assert found == losses
    expected = {name: value.detach() for name, value in host.named_parameters() if name in state}
    assert len(expected) == len([*host.parameters()]) and differing(state, expected) == []
    changed = {name: value for name, value in host.named_parameters() if value.requires_grad}
    assert trained.keys() == changed.keys() and differing(trained, changed) == []
    there.eval()
    with torch.no_grad():
        given = [{name: value.to(device) for name, value in batch.items()} for batch in words(9, 2)]
        assert evaluated == pytest.approx(sum(there(**batch).loss.item() for batch in given) / 2, rel=1e-5)
        for _ in range(3):
            newest = there(input_ids=prompt.to(device)).logits[:, -1].argmax(-1, keepdim=True)
            prompt = torch.cat([prompt, newest.cpu()], 1)
    assert torch.equal(text, prompt), (text, prompt)


def held_bytes(device):
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("what", ["whole", "streamed", "LoRA"])
def test_a_device_holds_no_more_than_was_planned(tmp_path, device, what):
    """But for the workspaces of cuBLAS, which are made before."""
    large = device == "cuda"
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 16000}
    config = transformers.LlamaConfig(**SIZES | (sizes if large else {}), use_cache=False)
    config.max_position_embeddings = 256
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    if what == "LoRA":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 2, 256 if large else 8), generator=generator)
    given = [{"input_ids": each, "labels": each} for each in tokens]
    if large:
        one = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        (one @ one).sum().backward()
        one.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = held_bytes(device)
    place = holdfast.Placement(
        recomputed_fraction=1.0, embedding_and_head="streamed" if what == "streamed" else "resident"
    )
    with holdfast.offload(
        model, fused(model), tmp_path, device=device, sample=given[0], micro_batches=2, placement=place
    ) as engine:
        planned = engine.preflight.device_bytes_predicted
        if large:  # measuring a sample is no part of the plan
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        losses = [engine.step(given) for _ in range(3)]
        engine.wait()
        found = held_bytes(device) - before
    assert losses[2] < losses[0]
    assert found <= 1.1 * planned, f"{found / planned:.2f} of {planned} planned bytes, {before} before"


BASES = [("plain", "bf16"), ("fp8", "fp32"), ("fp8", "bf16"), ("torchao", "fp32")]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize(("kind", "dtype"), BASES)
def test_a_referenced_base_gives_the_same_bits_wherever_state_stays(tmp_path, device, kind, dtype):
    """Read in every pass from its folder, in the form that it has there, also after a resume."""
    peft = pytest.importorskip("peft")
    folder = write_folder(tmp_path / "plain") if kind == "plain" else write_quantised(tmp_path / kind, kind)

    def train(name, steps, where, way="mixed", reference=True):
        model, weights = holdfast.pretrained(folder, reference=reference)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
        options = grouped(dtype=dtype, device=where, **PLACEMENTS[way])
        with holdfast.offload(model, fused(model), tmp_path / name, source=weights, **options) as engine:
            return [engine.step(words(step, 2)) for step in steps], engine.state_dict(trained=True)

    expected, adapters = train("whole", range(3), device, "host", reference=False)
    found, _ = train("run", range(2), device)
    last, state = train("run", range(2, 3), device, "ssd")
    assert found + last == expected
    assert adapters and differing(state, adapters) == []
    here, _ = train("here", range(3), "cpu")
    assert expected == pytest.approx(here, rel=1e-4 if dtype == "fp32" else 0.02)
