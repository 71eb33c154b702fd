"""Every family of models that the documentation names trains out of core with the bits of a plain loop.

In memory and from a folder, killed, resumed, exported and loaded back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast as library
from combined import covering
from killed import Killed
from support.grouped import grouped
from training import differing, same_bits, state_of, stored

transformers = pytest.importorskip("transformers")

import families  # noqa: E402
from families import FAMILIES, build, micro_batches  # noqa: E402

STEPS = 2
TRAITS = ("kind", "batch", "named", "attention", "says")
"""What makes families different for this library: the others are left to campaigns."""
TRIED = covering([{trait: getattr(each, trait) for trait in TRAITS} for each in FAMILIES.values()])
SLOW, LEFT = (pytest.mark.slow,), (pytest.mark.slow, pytest.mark.campaign)
EACH = [
    pytest.param(name, marks=() if family.quick else SLOW if place in TRIED else LEFT)
    for place, (name, family) in enumerate(FAMILIES.items())
]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def plain_loop(name, model):
    """Losses and state of a loop of its own."""
    family, losses = FAMILIES[name], []
    optimizer = adamw(model, fused=True)
    with library.keyed_rng(model, blocks=family.blocks and family.blocks(model)) as keys:
        for step in range(STEPS):
            total = 0.0
            for m, batch in enumerate(micro_batches(name, step)):
                keys.at(step, m)
                loss = model(**batch).loss
                (loss / family.micro_batches).backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / family.micro_batches)
    return losses, state_of(model, optimizer)


def opened(name, model, run, **options):
    blocks = FAMILIES[name].blocks
    options |= {"blocks": blocks(model)} if blocks else {}
    return library.offload(model, adamw(model), run, **grouped(dtype="fp32", clip_norm=0.5, **options))


def steps(name, engine, stop=STEPS):
    return [engine.step(micro_batches(name, step)) for step in range(engine.steps_done, stop)]


def killed_and_resumed(name, run, kill_at):
    """Losses of a run in memory that is killed before its last commit is published."""
    engine = opened(name, build(name), run)
    losses = steps(name, engine, STEPS - 1)
    engine.wait()
    kill_at("after_manifest_sync")
    with pytest.raises((Killed, library.HoldfastError)):
        steps(name, engine)
        engine.wait()
    engine.give_up()
    kill_at("")
    with opened(name, build(name), run) as engine:
        assert engine.steps_done == STEPS - 1
        return losses + steps(name, engine)


def from_folder(name, folder, run):
    """Losses of a run on meta."""
    model, weights = library.pretrained(folder)
    assert type(model).__name__ == name and all(p.is_meta for p in model.parameters())
    if FAMILIES[name].attention:
        model.set_attn_implementation(FAMILIES[name].attention)
    with opened(name, model, run, source=weights) as engine:
        return steps(name, engine)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.slow
def test_family_has_the_bits_of_a_plain_loop(in_memory, kill_at, holdfast, name):
    folder, memory, meta, out = (in_memory / each for each in ("folder", "memory", "meta", "out"))
    model = build(name)
    model.save_pretrained(folder)
    losses, expected = plain_loop(name, model)
    assert killed_and_resumed(name, memory, kill_at) == losses
    assert differing(stored(memory), expected) == []
    assert from_folder(name, folder, meta) == losses
    assert differing(stored(meta), expected) == []
    result = holdfast("convert", memory, out, "--to", "huggingface", "--model", folder)
    assert result.code == 0, result.err
    loaded, told = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    trained, back = model.state_dict(), loaded.state_dict()
    assert trained.keys() == back.keys()
    assert all(same_bits(value, back[key]) for key, value in trained.items())


def with_frozen_experts(model):
    """The model as transformers computes it one expert after another, with its experts frozen."""
    model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(module, "num_experts") and any(p.dim() == 3 for p in module.parameters(recurse=False)):
            module.requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("name", families.ONE_BY_ONE)
def test_experts_one_by_one_have_the_bits_of_a_plain_loop(in_memory, name):
    losses, expected = plain_loop(name, with_frozen_experts(build(name)))
    with opened(name, with_frozen_experts(build(name)), in_memory, expert_slots=2) as engine:
        assert steps(name, engine) == losses
    assert differing(stored(in_memory), expected) == []


@pytest.mark.slow
def test_experts_one_by_one_are_read_from_their_folder(in_memory):
    """The parameters of gpt-oss lie there as they are."""
    name, folder, run = "GptOssForCausalLM", in_memory / "folder", in_memory / "run"
    build(name).save_pretrained(folder)
    losses, _ = plain_loop(name, with_frozen_experts(build(name)))
    found = []
    for stop in (1, STEPS):
        model, weights = library.pretrained(folder, reference=True)
        with opened(name, with_frozen_experts(model), run, source=weights, expert_slots=2) as engine:
            found += steps(name, engine, stop)
            newest = engine._run.store.load(engine._run.store.line()[0])
        assert {unit.partition("-")[0] for unit in newest.referenced} == {
            f"model.layers.{block}.experts" for block in range(3)
        }
    assert found == losses


def test_page_is_made_of_the_families_that_are_tried():
    page = Path(__file__).parents[2] / "docs" / "families.md"
    assert page.read_text(encoding="utf-8") == families.page()
