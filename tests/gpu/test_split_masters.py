"""Masters in parts beside a separate device: the bits of whole ones, and no more memory than was predicted."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.quantities import KiB
from holdfast.schedule import work
from plain_loops import PLACEMENTS
from support.grouped import grouped
from support.masters import build_with
from training import adamw, batches, decoder, differing, read_atoms

WAYS = {
    "ssd": {},
    "mixed": PLACEMENTS["mixed"],
    "speculate": {"clipping": "speculate", "clip_norm": 1e-3},
    "defer": {"clipping": "defer", "clip_norm": 0.5},
    "delayed": {"delayed_fraction": 0.5, "recomputed_fraction": 0.5},
    "horizontal": {"schedule": "horizontal", "commit_every": 2},
}


def train(directory, device, steps, **options):
    """The losses of ``steps``. Nothing is left over."""
    model = decoder(blocks=4, width=128, hidden=256)
    given = {"dtype": "bf16", "device": device, "sample": batches(0, 1)[0], "micro_batches": 2, **options}
    with holdfast.offload(model, adamw(model, fused=True), directory, **grouped(**given)) as engine:
        losses = [engine.step(batches(step, 2)) for step in steps]
        engine.wait()
        assert not engine._run.residency.loaded and not engine._run.residency.lack_copy
        return losses


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("way", WAYS)
def test_masters_in_parts_have_the_bits_of_whole_ones(tmp_path, device, monkeypatch, way):
    monkeypatch.setattr(work, "TILE_BYTES", 400 * KiB)
    found = train(tmp_path / "split", device, range(2), **WAYS[way])
    found += train(tmp_path / "split", device, range(2, 4), **WAYS[way])
    build_with(monkeypatch, whole=True)
    assert found == train(tmp_path / "whole", device, range(4), **WAYS[way])
    assert differing(read_atoms(tmp_path / "split"), read_atoms(tmp_path / "whole")) == []
