"""Optimizers out of core have the bits of the same ones in a plain loop: whole matrices, moments of few bits, several
optimizers together; wherever their state stays, and after a resume."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.checkpointer import Checkpointer
from holdfast.errors import RunMismatch
from holdfast.optim import AdamW8bit, AdamWBF16, Apollo, Grass, Joined
from holdfast.store.run_store import LocalStore
from named_optimizers import OPTIMIZERS, matrices, vectors
from plain_loops import PLACEMENTS
from support.grouped import grouped
from training import batches, decoder, differing, state_of, stored, warm_up

STEPS = 6
WAYS = PLACEMENTS | {
    "delayed": {"delayed_fraction": 1.0, "activations_on_host": 0.0},
    "horizontal": {"schedule": "horizontal"},
}


def plain_loop(make, steps=STEPS):
    """Losses, and the state after each step."""
    model = decoder(blocks=3)
    optimizer = make(model)
    scheduler, losses, states = warm_up(optimizer), [], []
    for step in range(steps):
        made = [model(**batch) for batch in batches(step, 2)]
        for loss in made:
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in made) / 2)
        states.append(state_of(model, optimizer))
    return losses, states


def out_of_core(directory, make, steps, **options):
    """Losses of ``steps``, by number."""
    model = decoder(blocks=3)
    optimizer = make(model)
    with holdfast.offload(
        model,
        optimizer,
        directory,
        **grouped(scheduler=warm_up(optimizer), dtype="fp32", clip_norm=0.5, **options),
    ) as engine:
        return [engine.step(batches(step, 2)) for step in steps]


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_has_the_bits_of_a_plain_loop_wherever_state_stays(tmp_path, name, way):
    """And after a resume."""
    losses, states = plain_loop(OPTIMIZERS[name])
    found = out_of_core(tmp_path, OPTIMIZERS[name], range(4), **WAYS[way])
    assert differing(stored(tmp_path), states[3]) == []
    found += out_of_core(tmp_path, OPTIMIZERS[name], range(4, STEPS), **PLACEMENTS["host"])
    assert found == losses
    assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_checkpointer_recorded_goes_on_out_of_core_and_back(tmp_path, name):
    make = OPTIMIZERS[name]
    _, states = plain_loop(make, 6)

    def in_memory(root, steps, source=None):
        model = decoder(blocks=3)
        optimizer = make(model)
        scheduler = warm_up(optimizer)
        members = optimizer.members if isinstance(optimizer, Joined) else optimizer
        with Checkpointer(root, model=model, optimizer=members, scheduler=scheduler) as checkpointer:
            for step in range(checkpointer.resume(source=source), steps):
                for batch in batches(step, 2):
                    (model(**batch) / 2).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                checkpointer.step()
        return state_of(model, optimizer)

    assert differing(in_memory(tmp_path / "a", 2), states[1]) == []
    out_of_core(tmp_path / "b", make, range(2, 4), source=holdfast.From(tmp_path / "a"))
    assert differing(stored(tmp_path / "b"), states[3]) == []
    assert differing(in_memory(tmp_path / "c", 6, holdfast.From(tmp_path / "b")), states[5]) == []


def test_a_run_of_other_bits_is_refused(tmp_path):
    out_of_core(tmp_path, lambda model: AdamWBF16(model.parameters()), range(1))
    with pytest.raises(RunMismatch, match=r"exp_avg is BF16 .* there"):
        out_of_core(tmp_path, lambda model: torch.optim.AdamW(model.parameters()), range(1))
    with pytest.raises(RunMismatch, match=r"exp_avg is BF16 .* there"):
        out_of_core(tmp_path, lambda model: AdamW8bit(model.parameters()), range(1))


@pytest.mark.parametrize(
    "kind, each",
    [
        (torch.optim.AdamW, 12),
        (AdamWBF16, 8),
        (AdamW8bit, 6 + 8 / 256),
        (Apollo, 4 + 8 * 4 / 256),
        (Grass, 4 + 8 * 4 / 256),
    ],
)
def test_files_and_the_plan_count_what_an_element_takes(tmp_path, kind, each):
    """And its carry, of a master in parts."""
    model = decoder(blocks=2, width=256, hidden=1024)
    options = {"rank": 4} if kind in (Apollo, Grass) else {}
    with holdfast.offload(model, kind(model.parameters(), **options), tmp_path) as engine:
        engine.step(batches(0, 1))
    elements = sum(p.numel() for p in model.blocks[0].parameters())
    with LocalStore.read(tmp_path) as reader:
        manifest = reader.head()
        files = [file for name, file in manifest.files.items() if name.startswith("blocks.")]
        sizes = [(tmp_path / file.path).stat().st_size for file in files]
    assert sizes[0] == pytest.approx(elements * (each + 1 / 8), rel=0.06)  # headers and alignment
    assert [block.state_bytes for block in engine._plan.work.blocks] == sizes


@pytest.mark.slow
def test_the_plan_counts_what_updates_of_whole_tensors_take_besides(tmp_path):
    taken = {}
    for name in ("muon and adamw", "apollo", "grass", "adamw in bytes"):
        model = decoder(blocks=2)
        with holdfast.offload(
            model, OPTIMIZERS[name](model), tmp_path / name, sample=batches(0, 1)[0]
        ) as engine:
            taken[name] = engine._plan.memory.at("host").get("updates", 0)
    largest = sorted(p.numel() for p in model.parameters())[-2:]
    each = {
        "muon and adamw": 17,
        "apollo": 9,
        "grass": 9,
        "adamw in bytes": 0,
    }  # 4 of a master that was in parts
    assert taken == {name: bytes_each * sum(largest) for name, bytes_each in each.items()}


@pytest.mark.slow
def test_the_plan_counts_copies_of_gradients_and_every_worker(tmp_path):
    def taken(name, **options):
        model = decoder(blocks=2)
        sample = {"sample": batches(0, 1)[0], "clip_norm": 1.0}
        with holdfast.offload(
            model, OPTIMIZERS[name](model), tmp_path / f"{name} {options}", **grouped(**sample, **options)
        ) as engine:
            return engine._plan.memory.at("host").get("updates", 0)

    model = decoder(blocks=2)
    everywhere = sorted(p.numel() for p in model.parameters())
    in_blocks = sorted(p.numel() for p in model.blocks.parameters())
    outside = [p.numel() for name, p in model.named_parameters() if not name.startswith("blocks.")]
    assert everywhere[-3:] == in_blocks[-3:]
    assert taken("apollo", clipping="defer", update_workers=3) == 9 * sum(everywhere[-3:])
    assert taken("apollo", clipping="defer", update_workers=1) == 9 * everywhere[-1]
    each = [13 * count for count in in_blocks] + [5 * count for count in outside]
    assert taken("apollo", clipping="speculate") == sum(sorted(each)[-2:])
    assert taken("adamw in bytes", clipping="speculate", update_workers=3) == 0


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", ["grass, rows by chance", "apollo", "apollo-mini"])
def test_weights_alone_begin_with_the_optimizers_own_state(tmp_path, name):
    """Of which the seeds of the projections are part."""
    losses, states = plain_loop(OPTIMIZERS[name])
    save_file(
        {key: value.detach() for key, value in decoder(blocks=3).state_dict().items()},
        tmp_path / "w.safetensors",
    )
    source = holdfast.From(tmp_path / "w.safetensors", partial=True)
    with pytest.warns(UserWarning) as warned:
        found = out_of_core(tmp_path / "run", OPTIMIZERS[name], range(STEPS), source=source)
    assert all("beginning from" in str(each.message) for each in warned)
    assert found == losses
    assert differing(stored(tmp_path / "run"), states[-1]) == []


@pytest.mark.slow
def test_a_run_of_joined_optimizers_goes_on_with_those(tmp_path):
    def others(model):
        return Joined(
            torch.optim.SGD(matrices(model), lr=1e-2, momentum=0.9),
            torch.optim.AdamW(vectors(model), lr=1e-2),
        )

    out_of_core(tmp_path, OPTIMIZERS["muon and adamw"], range(2))
    with pytest.raises(RunMismatch, match=r"made with Joined\(Muon, AdamW\), this .* Joined\(SGD, AdamW\)"):
        out_of_core(tmp_path, others, range(2, 3))
