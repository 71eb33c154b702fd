"""State in tiles, and with the state outside the blocks on the SSD: other optimizers, and runs that go on otherwise."""

from __future__ import annotations

import resource
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, DoesNotFit
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload.setup import step_planning
from holdfast.offload.setup.process_settings import SPARE_FILES, allow_open_files
from holdfast.optim import AdamW8bit, Joined
from holdfast.quantities import KiB
from holdfast.schedule import work
from holdfast.schedule.memory_use import predict
from holdfast.schedule.mezo_schedule import zeroth
from holdfast.schedule.planner.placement import choose
from holdfast.schedule.work import LEAST_MEMORY, MemorySaving, StepShape
from holdfast.store.run_store import LocalStore
from plan_steps import uneven
from support.grouped import grouped
from training import batches, differing, read_atoms, state_of, stored

STEPS = 5


def made_model():
    """Every matrix is larger than the smallest part into which a tile may be cut, 4,096 elements."""
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(vocabulary=96, width=128, heads=2, kv_heads=2, blocks=2, hidden=256, context=8)
    )


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def in_bytes(model):
    return AdamW8bit(model.parameters(), lr=1e-2)


def whole_matrices(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return Joined(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-2, fused=True))


@cache
def plain_loop(make, clip_norm=0.5):
    """The loss of each step, and the state after it."""
    model = made_model()
    optimizer, losses, states = make(model), [], []
    for step in range(STEPS):
        made = [model(**batch) for batch in batches(step, 2)]
        for loss in made:
            (loss / 2).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in made) / 2)
        states.append(state_of(model, optimizer))
    return losses, states


def out_of_core(directory, make, steps, **options):
    """The losses of ``steps`` by number, and the names of the run's files."""
    model = made_model()
    with holdfast.offload(
        model, make(model), directory, **grouped(**{"dtype": "fp32", "clip_norm": 0.5, **options})
    ) as engine:
        losses = [engine.step(batches(step, 2)) for step in steps]
        reads_resident = ("ssd_read", "load_resident") in engine.traffic()
        assert reads_resident != engine._run.placement.saving.resident_state
    manifest = LocalStore.read(directory, direct=False).head()
    assert manifest is not None
    return losses, list(manifest.files)


@pytest.fixture
def tiles(monkeypatch):
    """A function that sets the size of a tile."""
    return lambda nbytes: monkeypatch.setattr(work, "TILE_BYTES", nbytes)


@pytest.mark.parametrize("make", [in_bytes, whole_matrices])
@pytest.mark.slow
def test_other_optimizers_have_their_bits_in_tiles(tmp_path, tiles, make):
    tiles(100 * KiB)
    losses, states = plain_loop(make)
    found, files = out_of_core(tmp_path, make, range(STEPS))
    assert found == losses
    assert len(files) > 10
    assert differing(read_atoms(tmp_path), states[-1]) == []


@pytest.mark.slow
def test_a_run_goes_on_with_tiles_of_another_size(tmp_path, tiles, monkeypatch):
    """And with the state outside of the blocks on the SSD, and in memory again."""
    losses, states = plain_loop(fused_adamw)
    found = []
    sizes = [1 << 30, 100 * KiB, 300 * KiB, 1 << 30]
    for nbytes, (start, stop) in zip(sizes, pairwise([0, 1, 3, 4, STEPS])):
        tiles(nbytes)
        saving = {"saving": LEAST_MEMORY} if nbytes == 100 * KiB else {}
        monkeypatch.setattr(
            step_planning, "choose", lambda *a, saving=saving, **o: replace(choose(*a, **o), **saving)
        )
        found += out_of_core(tmp_path, fused_adamw, range(start, stop))[0]
    assert found == losses
    assert differing(stored(tmp_path), states[-1]) == []


def test_the_first_values_of_a_run_are_those_of_the_model(tmp_path, tiles):
    tiles(100 * KiB)
    model = made_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with holdfast.offload(model, fused_adamw(model), tmp_path, precision="fp32") as engine:
        found = engine.state_dict()
    assert differing(found, expected) == []


def test_the_state_outside_the_blocks_leaves_memory_only_where_the_budget_lacks_it():
    large, shape = replace(uneven(3), resident_state_bytes=10**7), StepShape(micro_batches=2)
    ask = partial(choose, large, shape, activations=0.0, optimizer=0.0, params=0.0)
    needed = predict(large, ask(None), shape).host_bytes
    one_buffer = ask(needed - 1)
    assert (ask(needed).saving, one_buffer.saving) == (MemorySaving(2, True), MemorySaving(1, True))
    needed = predict(large, one_buffer, shape).host_bytes
    assert ask(needed) == one_buffer
    assert ask(needed - 1).saving == MemorySaving(2, False)
    with pytest.raises(DoesNotFit):
        ask(needed - 10**7)
    with pytest.raises(DoesNotFit):  # MeZO has no operation that reads it
        ask(predict(large, ask(None), shape, zeroth).host_bytes - 1, schedule=zeroth)


def test_the_limit_of_open_files_is_raised_or_said(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        allow_open_files(500)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (500 + SPARE_FILES, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2000))
    with pytest.raises(BadInput, match=r"5000 files, .* allows 2000 open files"):
        allow_open_files(5000)
