"""State in tiles on a separate device, with all that saves memory: the bits of whole blocks."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

import holdfast
from holdfast.quantities import KiB
from holdfast.schedule import work
from holdfast.schedule.planner.placement import choose
from holdfast.schedule.work import LEAST_MEMORY
from played_device import played  # noqa: F401
from support.grouped import grouped
from training import adamw, batches, decoder, differing, read_atoms


def train(directory, steps, **options):
    model = decoder(blocks=2, width=128, hidden=256)
    with holdfast.offload(
        model, adamw(model, fused=True), directory,
        **grouped(dtype="fp32", clip_norm=0.5, device="played", recomputed_fraction=1.0, **options),
    ) as engine:  # fmt: skip
        return [engine.step(batches(step, 2)) for step in steps]


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    "options", [{"clipping": "speculate"}, {"commit_every": 2}, {"schedule": "horizontal"}]
)
def test_tiles_have_the_bits_of_whole_blocks(tmp_path, monkeypatch, options):
    expected = train(tmp_path / "whole", range(4), **options)
    monkeypatch.setattr(work, "TILE_BYTES", 100 * KiB)
    monkeypatch.setattr(
        import_module("holdfast.offload.setup.step_planning"),
        "choose",
        lambda *args, **asked: replace(choose(*args, **asked), saving=LEAST_MEMORY),
    )
    found = train(tmp_path / "tiles", range(2), **options)
    found += train(tmp_path / "tiles", range(2, 4), **options)
    assert found == expected
    assert differing(read_atoms(tmp_path / "tiles"), read_atoms(tmp_path / "whole")) == []
