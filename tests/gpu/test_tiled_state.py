"""State in tiles on a separate device, with all that saves memory: the bits of whole blocks."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.quantities import KiB
from holdfast.schedule import work
from holdfast.schedule.planner.placement import choose
from holdfast.schedule.work import LEAST_MEMORY
from support.grouped import grouped
from training import adamw, batches, decoder, differing, read_atoms


def train(directory, device, steps, width=128, tied=False, **options):
    model = decoder(blocks=2, width=width, hidden=2 * width)
    if tied:
        model.head.weight = model.embed.weight
    with holdfast.offload(
        model, adamw(model, fused=True), directory,
        **grouped(dtype="fp32", clip_norm=0.5, device=device, recomputed_fraction=1.0, **options),
    ) as engine:  # fmt: skip
        return [engine.step(batches(step, 2)) for step in steps]


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize(
    "options", [{"clipping": "speculate"}, {"commit_every": 2}, {"schedule": "horizontal"}]
)
def test_tiles_have_the_bits_of_whole_blocks(tmp_path, device, monkeypatch, options):
    expected = train(tmp_path / "whole", device, range(4), **options)
    monkeypatch.setattr(work, "TILE_BYTES", 100 * KiB)
    monkeypatch.setattr(
        import_module("holdfast.offload.setup.step_planning"),
        "choose",
        lambda *args, **asked: replace(choose(*args, **asked), saving=LEAST_MEMORY),
    )
    found = train(tmp_path / "tiles", device, range(2), **options)
    found += train(tmp_path / "tiles", device, range(2, 4), **options)
    assert found == expected
    assert differing(read_atoms(tmp_path / "tiles"), read_atoms(tmp_path / "whole")) == []


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("options", [{}, {"schedule": "horizontal"}, {"delayed_fraction": 0.5}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_streamed_embedding_and_head_have_the_bits_of_those_that_stay(tmp_path, device, tied, options):
    options = {"tied": tied, **options}
    expected = train(tmp_path / "resident", device, range(4), 16, **options)
    found = train(tmp_path / "streamed", device, range(2), 16, embedding_and_head="streamed", **options)
    found += train(tmp_path / "streamed", device, range(2, 4), 16, **options)
    assert found == expected
    assert differing(read_atoms(tmp_path / "streamed"), read_atoms(tmp_path / "resident")) == []


@pytest.mark.usefixtures("same_bits")
def test_a_device_that_could_not_hold_an_embedding_and_a_head_has_them_streamed(tmp_path, device):
    def opened(name, **options):
        model = Decoder(
            DecoderConfig(vocabulary=9000, blocks=2, width=32, heads=2, kv_heads=1, hidden=4000, context=8)
        )
        return holdfast.offload(
            model,
            adamw(model),
            tmp_path / name,
            device=device,
            precision="fp32",
            sample=batches(0, 1)[0],
            **options,
        )

    needed = {}
    for way in ("resident", "streamed"):
        with opened(way, placement=holdfast.Placement(embedding_and_head=way)) as engine:
            needed[way] = engine.preflight.device_bytes_predicted
    for way, budget in needed.items():
        with opened(f"within {budget}", budget=holdfast.Budget(device=budget)) as engine:
            assert (engine._run.epilogue is not None) == (way == "streamed")
            assert engine.preflight.device_bytes_predicted <= budget
            engine.step(batches(0, 1))
