"""A Lightning script with the callback ends, after it was killed and started again, as one that never was."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")

from dist.habits import LIGHTNING, ended, killed_it_ends_the_same
from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World("lightened") as world:
        yield world


def written_in(run: Path) -> dict[str, int]:
    """Return when each file of a run's steps was written, by path. Whoever enters cuts the logs where they end."""
    folders = ("commits", "timelines", "data")
    files = [each for folder in folders for each in (run / folder).rglob("*") if each.is_file()]
    return {str(each): each.stat().st_mtime_ns for each in files}


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("habit", ["not validated", *(each for each in LIGHTNING if each != "not validated")])
def test_killed_it_ends_the_same(world, tmp_path, habit):
    killed_it_ends_the_same(world, tmp_path, 1, LIGHTNING[habit])


@pytest.mark.slow
def test_killed_two_processes_end_the_same(world, tmp_path):
    """The other habits are in tests/crash."""
    killed_it_ends_the_same(world, tmp_path, 2, LIGHTNING["often validated"])


@pytest.mark.slow
def test_another_number_of_processes_is_refused_by_name(world, tmp_path):
    ended(world.run(2, root=tmp_path / "run", output=tmp_path, max_steps=3))
    for others, why in (
        (1, "The run reads an order by seed and epoch, and this script"),
        (3, "A step of the run has 6 samples"),
    ):
        before = written_in(tmp_path / "run")
        said = world.run(others, root=tmp_path / "run", output=tmp_path)
        assert f"was trained by 2 ranks, and here are {others}. {why}" in said[0]["error"]
        assert written_in(tmp_path / "run") == before


@pytest.mark.slow
def test_what_loses_the_place_is_refused(world, tmp_path):
    ended(world.run(1, root=tmp_path / "run", output=tmp_path, max_epochs=1))
    [checkpoint] = tmp_path.glob("*.ckpt")
    for setting, text in (
        ({"ckpt_path": checkpoint}, "would be loaded over the run"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs gives up the place"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches 1, now it is 2"),
    ):
        [said] = world.run(1, root=tmp_path / "run", output=tmp_path, **setting)
        assert text in said["error"], said
