"""The standbys of several ranks follow the run, each its own part, and take over from one step."""

from __future__ import annotations

import pytest

from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World("followed") as world:
        yield world


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_follows_its_part(world, tmp_path, kind):
    found = world.run(2, kind=kind, root=tmp_path / "run")
    assert all(said.get("finished") and said["same"] for said in found), found
    assert all("followed to step 4" in said["how"] for said in found), found


def test_rank_that_is_behind_holds_up_no_other(world, tmp_path):
    found = world.run(2, kind="fsdp", root=tmp_path / "run", stops=1)
    assert all(said.get("finished") and said["same"] for said in found), found
    assert "followed to step 4" in found[0]["how"] and "followed to step 2" in found[1]["how"], found


def test_updates_that_are_collectives_are_not_followed(world, tmp_path):
    found = world.run(2, kind="ddp", root=tmp_path / "run", optimizer="muon")
    assert all(said.get("finished") and said["same"] for said in found), found
    assert all(" loaded" in said["how"] for said in found), found
