"""Masters in parts: the compute copy of a bf16 block lies in the files of its state, and no bit differs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import BadInput, ChunkCorrupt, ModelNotSupported, RunMismatch
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.optim import AdamW8bit, AdamWBF16
from holdfast.optim.adamw import BLOCK, to_24_bits
from holdfast.quantities import KiB, MiB
from holdfast.schedule import work
from holdfast.schedule.operations import as_guessed, traffic
from holdfast.sources import source_of
from holdfast.state.split_masters import nearest_24_bits
from holdfast.store.run_store import LocalStore
from plain_loops import PLACEMENTS
from support.grouped import grouped
from support.masters import build_with
from training import batches, differing, read_atoms, stored

STEPS = 4
WAYS = {
    "ssd": {**PLACEMENTS["ssd"], "clip_norm": None},
    "host": PLACEMENTS["host"],
    "mixed": {**PLACEMENTS["mixed"], "clip_norm": None},
    "params": {"params_on_host": 1.0, "clipping": "per_block"},
    "state": {"optimizer_on_host": 1.0, "commit_every": 2},
    "delayed": {"delayed_fraction": 0.5, "clip_norm": None},
    "defer": {"clipping": "defer"},
    "speculate": {"clipping": "speculate", "clip_norm": 1e-3},
    "speculate, mixed": {"clipping": "speculate", "clip_norm": 0.5, "params_on_host": 0.5},
    "horizontal": {"schedule": "horizontal"},
    "seldom durable": {"commit_every": 3, "clip_norm": None},
    "kept": {"recomputed_fraction": 0.0, "clip_norm": None},
}


def made_model() -> Decoder:
    """Two blocks of several tiles each, with a frozen matrix in one."""
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=96, width=128, heads=2, kv_heads=2, blocks=2, hidden=256, context=8)
    model = Decoder(config)
    model.blocks[1].mlp.up.weight.requires_grad_(False)
    return model


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def adafactor(model):
    """It needs whole tensors."""
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


OPTIMIZERS = {
    "adamw": fused_adamw,
    "adafactor": adafactor,
    "bf16": lambda model: AdamWBF16(model.parameters(), lr=1e-2),
    "8bit": lambda model: AdamW8bit(model.parameters(), lr=1e-2),
    "24": lambda model: AdamW8bit(_rounded(model).parameters(), lr=1e-2, master_bits=24),
}


def _rounded(model):
    """``model`` with masters of 24 bits from the beginning, as a run that splits them has."""
    for parameter in model.parameters():
        parameter.data.copy_(to_24_bits(parameter.data, 0, 0))
    return model


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(work, "TILE_BYTES", 400 * KiB)


@pytest.fixture
def whole_masters(monkeypatch):
    """A function that sets whether engines are built that store the compute copy beside whole masters."""
    return lambda whole: build_with(monkeypatch, whole=whole)


def offload(directory, make=fused_adamw, **options):
    model = made_model()
    given = {"dtype": "bf16", "clip_norm": 0.5, **options}
    return holdfast.offload(model, make(model), directory, **grouped(**given))


def train(directory, steps, make=fused_adamw, **options):
    """The losses of ``steps`` by number."""
    with offload(directory, make, **options) as engine:
        return [engine.step(batches(step, 2)) for step in steps]


def keys_of(directory):
    """The keys of all tensors in the files of the newest commit."""
    reader = LocalStore.read(directory, direct=False)
    manifest = reader.head()
    assert manifest is not None
    return [entry.key for file in manifest.files.values() for entry in reader.layout(file).entries]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_no_bit_depends_on_where_the_compute_copy_is(tmp_path, whole_masters, way):
    losses = train(tmp_path / "split", range(STEPS), **WAYS[way])
    whole_masters(True)
    assert losses == train(tmp_path / "whole", range(STEPS), **WAYS[way])
    high = [
        [key for key in keys_of(tmp_path / run) if key.endswith("/param.high")] for run in ("split", "whole")
    ]
    assert len(high[0]) > 10 and not high[1]
    found, expected = (read_atoms(tmp_path / run) for run in ("split", "whole"))
    assert found.keys() == expected.keys() and differing(found, expected) == []


def test_a_foreign_tool_joins_the_parts_as_they_are_described(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "TILE_BYTES", 128 * MiB)
    train(tmp_path, range(2))
    assert differing(stored(tmp_path), read_atoms(tmp_path)) == []


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_kind_of_optimizer_steps_masters_in_parts(tmp_path, whole_masters, name):
    losses = train(tmp_path / "split", range(2), OPTIMIZERS[name], **WAYS["mixed"])
    whole_masters(True)
    assert losses == train(tmp_path / "whole", range(2), OPTIMIZERS[name], **WAYS["mixed"])
    assert differing(read_atoms(tmp_path / "split"), read_atoms(tmp_path / "whole")) == []


def eight_bits(model, master_bits=24):
    return AdamW8bit(model.parameters(), lr=1e-2, master_bits=master_bits)


@pytest.mark.slow
def test_masters_of_24_bits_take_one_byte_beside_the_compute_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "TILE_BYTES", 128 * MiB)
    sizes, everything = {}, holdfast.Placement(recomputed_fraction=1.0)
    for bits in (24, 32):
        model = Decoder(replace(made_model().config, width=512, hidden=1024))
        with holdfast.offload(
            model,
            eight_bits(model, bits),
            tmp_path / str(bits),
            precision="bf16",
            clipping=None,
            placement=everything,
        ) as engine:
            engine.step(batches(0, 2))
            engine.wait()
            before = engine.traffic()
            engine.step(batches(1, 2))
            engine.wait()
            moved = {key: n - before.get(key, 0) for key, n in engine.traffic().items()}
            sizes[bits] = moved["ssd_read", "load_state"], moved["ssd_write", "store_state"]
            trained = sum(unit.elements for unit in engine._run.blocks)
    moments = 2 + 8 / BLOCK
    for bits, low in ((24, 1), (32, 2)):
        rest = low + 1 / 8 + moments
        assert sizes[bits] == pytest.approx((rest * trained, (2 + rest) * trained), rel=0.06)  # filler
    assert sizes[32][1] - sizes[24][1] == pytest.approx(trained, rel=0.03)
    assert differing(stored(tmp_path / "24"), read_atoms(tmp_path / "24")) == []


@pytest.mark.slow
def test_values_are_rounded_to_24_bits_when_a_run_begins_and_when_it_changes_to_them(tmp_path):
    def masters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def rounded(values):
        bits = {name: nearest_24_bits(v.reshape(-1).numpy().view(np.uint32)) for name, v in values.items()}
        return {
            name: torch.from_numpy(b.view(np.float32)).view(values[name].shape) for name, b in bits.items()
        }

    with offload(tmp_path / "fresh", eight_bits) as engine:
        held = engine.state_dict()
    started = masters(made_model())
    in_blocks = [name for name in held if name.startswith("blocks.") and name != "blocks.1.mlp.up.weight"]
    trained = [name for name in held if name != "blocks.1.mlp.up.weight"]
    expected = {name: rounded(started)[name] if name in trained else started[name] for name in held}
    assert differing(expected, held) == [] and differing(started, held) != []
    train(tmp_path / "run", range(2), partial(eight_bits, master_bits=32))
    atoms = read_atoms(tmp_path / "run")
    before = {name: atoms[f"{name}/param"] for name in in_blocks}
    with offload(tmp_path / "next", eight_bits, source=holdfast.From(tmp_path / "run")) as engine:
        after = engine.state_dict()
    assert differing(rounded(before), {name: after[name] for name in in_blocks}) == []


@pytest.mark.slow
def test_24_bits_do_not_depend_on_what_is_in_parts(tmp_path, monkeypatch, whole_masters):
    """The embedding and the head are whole where they stay on the device, and in parts where they are streamed."""
    monkeypatch.setattr(import_module("holdfast.offload.model.blocks"), "LEAST_STREAMED", 0.0)
    found = {}
    for way in ("resident", "streamed", "whole"):
        whole_masters(way == "whole")
        options = {"embedding_and_head": "streamed" if way == "streamed" else "resident"}
        found[way] = train(tmp_path / way, range(3), eight_bits, **options)
    assert found["resident"] == found["streamed"] == found["whole"]
    for way in ("streamed", "whole"):
        assert differing(read_atoms(tmp_path / way), read_atoms(tmp_path / "resident")) == []


def test_a_run_keeps_the_bits_of_its_masters(tmp_path):
    train(tmp_path, range(2), partial(eight_bits, master_bits=32))
    before = read_atoms(tmp_path)
    with pytest.raises(
        RunMismatch, match=r"has masters of 32 bits, and param_groups\[0\]\['master_bits'\] is 24"
    ):
        offload(tmp_path, eight_bits)
    with offload(tmp_path, partial(eight_bits, master_bits=32)) as engine:
        for group in engine._user.optimizer.param_groups:
            group["master_bits"] = 24
        with pytest.raises(
            BadInput, match=r"'master_bits'\] was set to 24, and this run holds masters of 32"
        ):
            engine.step(batches(2, 2))
    assert differing(read_atoms(tmp_path), before) == []


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("way", ["ssd", "host"])
@pytest.mark.slow
def test_a_run_with_whole_masters_goes_on_and_back(tmp_path, whole_masters, way):
    expected, found = train(tmp_path / "split", range(STEPS), **WAYS[way]), []
    for whole, steps in ((True, range(1)), (False, range(1, 3)), (True, range(3, STEPS))):
        whole_masters(whole)
        found += train(tmp_path / "run", steps, **WAYS[way])
    assert found == expected
    assert differing(read_atoms(tmp_path / "run"), read_atoms(tmp_path / "split")) == []
    assert not any(".high" in key for key in keys_of(tmp_path / "run"))


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_moves_the_bytes_of_its_list_alone(tmp_path, way):
    with offload(tmp_path, sample=batches(0, 1)[0], **WAYS[way]) as engine:
        for step in range(3):
            engine.wait()
            before = engine.traffic()
            engine.step(batches(step, 2))
            engine.wait()
            moved = {key: n - before.get(key, 0) for key, n in engine.traffic().items()}
            commits = (step + 1) % WAYS[way].get("commit_every", 1) == 0
            made = [ops for (_, shape), ops in engine.operations.items() if shape.commit == commits]
            listed = [dict(traffic(ops)) for each in made for ops in (each, as_guessed(each))]
            assert {key: n for key, n in moved.items() if n} in listed


def test_a_run_in_fp32_begins_from_masters_in_parts(tmp_path):
    train(tmp_path / "run", range(2))
    atoms = read_atoms(tmp_path / "run")
    source = holdfast.From(tmp_path / "run")
    model = made_model()
    with holdfast.offload(
        model, fused_adamw(model), tmp_path / "wide", precision="fp32", source=source
    ) as wide:
        values = wide.state_dict()
    assert differing({f"{name}/param": value for name, value in values.items()},
                     {key: value for key, value in atoms.items() if key.endswith("/param")}) == []  # fmt: skip
    assert differing(read_atoms(tmp_path / "wide"), atoms) == []


def test_readers_of_any_format_find_fp32_masters(tmp_path):
    train(tmp_path / "run", range(2))
    with offload(tmp_path / "run") as engine:
        values = engine.state_dict()
    source = source_of(str(tmp_path / "run"))
    for name, value in values.items():
        found = source.atoms[f"{name}/param"]
        if name != "blocks.1.mlp.up.weight":
            assert found.atom.dtype == "F32"
        assert torch.equal(read_in_ranges(source, found).view(value.shape), value), name


def read_in_ranges(source, stored):
    """The elements of a tensor, read in ranges that begin and end inside of what is joined at once."""
    flat = torch.empty(stored.atom.elements)
    for piece in stored.pieces:
        count, at = piece.box.elements, piece.box.start[0] * (stored.atom.elements // stored.atom.shape[0])
        for start in range(0, count, 1013):
            stop = min(start + 1013, count)
            into = memoryview(bytearray(4 * (stop - start)))
            source.read(piece.part, 4 * (piece.offset + start), into)
            flat[at + start : at + stop] = torch.frombuffer(into, dtype=torch.float32)
    return flat


@pytest.mark.parametrize("part", ["high", "low", "carry"])
def test_damage_of_any_part_is_found_and_named(tmp_path, part):
    train(tmp_path, range(2))
    reader = LocalStore.read(tmp_path, direct=False)
    manifest = reader.head()
    file = next(file for name, file in manifest.files.items() if name.startswith("blocks.0.tile1"))
    entry = next(entry for entry in reader.layout(file).entries if entry.key.endswith(f"/param.{part}"))
    data = bytearray((tmp_path / file.path).read_bytes())
    data[entry.offset + entry.nbytes // 2] ^= 4
    (tmp_path / file.path).write_bytes(data)
    [damage] = reader.verify(manifest)
    assert isinstance(damage, ChunkCorrupt) and entry.key.removesuffix(f".{part}") in damage.atoms
    with pytest.warns(UserWarning, match="resuming from step 1 in spite of damage"):
        train(tmp_path, range(0))


def test_a_pass_verifies_the_compute_copy_that_it_reads(tmp_path):
    engine = offload(tmp_path)
    engine.step(batches(0, 2))
    engine.wait()
    tile = engine._run.blocks[0].tiles[0]
    path = tmp_path / engine._run.stored[tile.name].path(engine._run.newest[tile.name].generation)
    with path.open("r+b") as file:
        file.seek(tile.high_start + 100)
        byte = file.read(1)
        file.seek(tile.high_start + 100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ChunkCorrupt, match=r"fails? (its|their) checksum"):
        engine.step(batches(1, 2))


def clamp_data(weight):
    weight.data.clamp_(-0.01, 0.01)


@torch.no_grad()
def clamp(weight):
    weight.clamp_(-0.01, 0.01)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("change", [clamp, clamp_data])
@pytest.mark.parametrize("way", ["ssd", "params", "speculate"])
def test_a_block_that_changes_its_weights_in_place_is_refused_and_no_master_changes(tmp_path, change, way):
    train(tmp_path, range(1), **WAYS[way])
    before = read_atoms(tmp_path)
    with (
        pytest.raises(
            ModelNotSupported, match=r"the model changed .*blocks\.0\.mlp\.down\.weight.* in place"
        ),
        offload(tmp_path, **WAYS[way]) as engine,
    ):
        down = engine._run.model.blocks[0].mlp.down
        down.register_forward_pre_hook(lambda module, args: change(module.weight))
        engine.step(batches(1, 2))
    assert differing(read_atoms(tmp_path), before) == []


@pytest.mark.parametrize("change", [clamp, clamp_data])
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_a_change_in_place_that_would_be_lost_is_refused(tmp_path, mode, change):
    with offload(tmp_path, dtype="fp32") as engine, mode():
        down = engine._run.model.blocks[0].mlp.down
        down.register_forward_pre_hook(lambda module, args: change(module.weight))
        with pytest.raises(ModelNotSupported, match=r"changed blocks\.0\.mlp\.down\.weight in place"):
            engine.evaluate(batches(1, 2))


@pytest.mark.parametrize("options", [{}, {"params_on_host": 1.0}, {"recomputed_fraction": 0.0}], ids=str)
def test_a_change_through_data_is_refused_before_any_update(tmp_path, options):
    """With whole masters no checksum of an update would find it."""
    with offload(tmp_path, dtype="fp32", **options) as engine:
        before = engine.state_dict()
        down = engine._run.model.blocks[0].mlp.down
        down.register_forward_pre_hook(lambda module, args: clamp_data(module.weight))
        with pytest.raises(ModelNotSupported, match=r"changed blocks\.0\.mlp\.down\.weight in place"):
            engine.step(batches(0, 2))
    found = {key.removesuffix("/param"): value for key, value in read_atoms(tmp_path).items()}
    assert differing(found, before) == []
