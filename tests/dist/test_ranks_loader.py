"""A loader whose place is each rank's own does not go on with another number of ranks: it is refused by its name."""

from __future__ import annotations

import pytest

from dist.world import finished

WORLDS = [(2, 1), (1, 2), (3, 2)]
REFUSED = "RunMismatch: the place in the data that {} keeps is each rank's own: {} wrote the run, and {} would go on"


def ranks_of(count):
    return f"{count} rank{'s' * (count > 1)}"


def refused(ranks, wrote):
    for said in ranks:
        assert REFUSED.format("Cursor", ranks_of(wrote), ranks_of(len(ranks))) in said["error"], said
        assert f"Resume with {wrote}" in said["error"] and "holdfast.loader" in said["error"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("worlds", WORLDS)
def test_it_is_refused_and_goes_on_with_as_many_ranks_as_before(world, tmp_path, worlds):
    one, other = worlds
    finished(world.run(one, kind="ddp", root=tmp_path, steps=4, base_every=3, loader="cursor"))
    refused(world.run(other, kind="ddp", root=tmp_path, steps=6, loader="cursor"), one)
    assert finished(world.run(one, kind="ddp", root=tmp_path, steps=6, loader="cursor"))[0]["resumed"] == 4


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("at", ["", "@4"])
@pytest.mark.parametrize("worlds", WORLDS)
def test_it_is_refused_as_a_source(world, tmp_path, worlds, at):
    """Also of a base, which is read as any state is."""
    one, other = worlds
    finished(world.run(one, kind="ddp", root=tmp_path / "run", steps=4, save_at=4, loader="cursor"))
    options = {"kind": "ddp", "root": tmp_path / "other", "steps": 6, "loader": "cursor"}
    refused(world.run(other, resume={"source": f"{tmp_path / 'run'}{at}"}, **options), one)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("loader", ["elastic", "holdfast"])
@pytest.mark.parametrize("worlds", WORLDS)
def test_one_that_says_that_it_counts_for_all_ranks_goes_on(world, tmp_path, worlds, loader):
    one, other = worlds
    finished(world.run(one, kind="ddp", root=tmp_path, steps=4, base_every=3, loader=loader))
    assert finished(world.run(other, kind="ddp", root=tmp_path, steps=6, loader=loader))[0]["resumed"] == 4


def test_a_run_of_another_loader_is_refused(world, tmp_path):
    finished(world.run(1, kind="plain", root=tmp_path, steps=4, loader="cursor"))
    [said] = world.run(1, kind="plain", root=tmp_path, steps=6, loader="holdfast")
    assert "the run's loader was not holdfast.loader: it kept batches" in said["error"]
