"""A Lightning script with the callback ends, after it was killed and started again, as one that never was."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from dist.habits import LIGHTNING, ended, killed_it_ends_the_same
from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World("lightened") as world:
        yield world


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("habit", LIGHTNING)
def test_killed_it_ends_the_same(world, tmp_path, habit):
    killed_it_ends_the_same(world, tmp_path, 1, LIGHTNING[habit])


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["plain", "often validated"])
def test_killed_two_processes_end_the_same(world, tmp_path, habit):
    """The other habits are in tests/crash."""
    killed_it_ends_the_same(world, tmp_path, 2, LIGHTNING[habit])


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 3])
def test_another_number_of_processes_is_refused_by_name(world, tmp_path, others):
    ended(world.run(2, root=tmp_path / "run", output=tmp_path, max_steps=3))
    said = world.run(others, root=tmp_path / "run", output=tmp_path)
    why = {
        1: "The run reads an order by seed and epoch, and this script",
        3: "A step of the run has 6 samples",
    }
    assert f"was trained by 2 ranks, and here are {others}. {why[others]}" in said[0]["error"]


def test_a_checkpoint_of_the_trainer_is_not_loaded_over_the_run(world, tmp_path):
    ended(world.run(1, root=tmp_path / "run", output=tmp_path, max_epochs=1))
    [checkpoint] = tmp_path.glob("*.ckpt")
    [said] = world.run(1, root=tmp_path / "run", output=tmp_path, ckpt_path=checkpoint)
    assert "would be loaded over the run" in said["error"], said


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, text",
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs gives up the place"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches 1, now it is 2"),
    ],
)
def test_settings_that_lose_the_place_are_refused(world, tmp_path, setting, text):
    ended(world.run(1, root=tmp_path / "run", output=tmp_path, max_epochs=1))
    [said] = world.run(1, root=tmp_path / "run", output=tmp_path, **setting)
    assert text in said["error"], said
