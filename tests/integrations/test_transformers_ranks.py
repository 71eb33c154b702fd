"""Several processes of a ``Trainer`` with the callback end, after they were killed, as ones that never were."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from dist.habits import TRAINER, ended, killed_it_ends_the_same
from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World("trained") as world:
        yield world


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("habit", ["plain", "masks and accumulation", "stream", "notes"])
def test_killed_they_end_the_same(world, tmp_path, habit):
    """The other habits are in tests/crash."""
    killed_it_ends_the_same(world, tmp_path, 2, TRAINER[habit])


@pytest.mark.slow
def test_another_number_of_processes_is_refused_by_name(world, tmp_path):
    ended(world.run(2, root=tmp_path / "run", max_steps=3))
    for others in (1, 3):
        said = world.run(others, root=tmp_path / "run")
        assert f"was trained by 2 ranks, and here are {others}. A step of the run has 6" in said[0]["error"]
    ended(world.run(2, root=tmp_path / "run"))
