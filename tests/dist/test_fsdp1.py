"""FSDP1 shows stretches of flattened parameters, of which nothing says what they are: it is refused by name."""

from __future__ import annotations

import pytest

from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 inside", "fsdp1 flat", "fsdp1 flat inside"])
@pytest.mark.parametrize("width", [0, 12])
def test_fsdp1_is_refused_on_all_ranks_with_the_way_out_and_nothing_written(world, tmp_path, kind, width):
    """Width 0 is one parameter, of which two ranks have as much: it would be taken for copies."""
    said = world.run(2, kind=kind, root=tmp_path / "run", steps=2, width=width)
    name = "the model"
    if kind.endswith("inside"):
        name = "_flat_param" if "flat" in kind else "scale" if width else "weight"
    for each in said:
        assert f"ModelNotSupported: {name} is of FullyShardedDataParallel (FSDP1)" in each["error"], each
        assert "Use fully_shard (FSDP2)" in each["error"] and "holdfast.adapters.dcp" in each["error"]
    assert not (tmp_path / "run").exists()
