"""FSDP1: models that it wraps are refused by name, and runs that an earlier version wrote under it are read."""

from __future__ import annotations

import shutil

import pytest

from dist.world import ended
from golden.flattened import ARCHIVE, DIGESTS


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(
    "kind, width", [(kind, width) for kind in ("fsdp1", "fsdp1 flat", "fsdp1 inside") for width in (12, 0)]
)
def test_fsdp1_model_is_refused_by_all_ranks(world, tmp_path, kind, width):
    for said in world.run(2, root=tmp_path / "run", steps=2, kind=kind, width=width):
        assert said["error"].startswith("ModelNotSupported: ") and "at" not in said, said
        assert "FullyShardedDataParallel (FSDP1)" in said["error"]
        assert "fully_shard (FSDP2)" in said["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, ranks", [("ddp", 3), ("fsdp", 2)])
def test_fsdp1_run_goes_on_otherwise(world, tmp_path, kind, ranks):
    shutil.unpack_archive(ARCHIVE, tmp_path / "run")
    after = ended(world.run(ranks, root=tmp_path / "run", steps=9, kind=kind, optimizer="powers"))
    assert after[0]["resumed"] == 8
    assert after[0]["digests"]["8"] == DIGESTS[8]
    again = ended(world.run(2, root=tmp_path / "run", steps=9, kind="fsdp", optimizer="powers"))
    assert again[0]["digests"] == {"9": after[0]["digests"]["9"]}
