"""Nodes with a directory each: a rank is killed at a failpoint, and a directory removed, as if its node were lost."""

from __future__ import annotations

import random
import shutil

import pytest

from combined import some_of
from dist.world import World
from holdfast import failpoints

STEPS = 16
EVERY = [*failpoints.NODES, *failpoints.RANKS, *failpoints.NAMES, *failpoints.JOURNAL]


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("failpoint", failpoints.NODES)
def test_a_rank_is_killed_at_a_failpoint_of_nodes_and_a_node_is_lost(world, tmp_path, failpoint):
    chance = random.Random(failpoint)
    kill_and_lose(world, tmp_path, failpoint, 1 + chance.randrange(2), chance.randrange(3))


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("failpoint", some_of(2, [name for name in EVERY if name not in failpoints.NODES]))
def test_a_rank_is_killed_at_another_failpoint_and_a_node_is_lost(world, tmp_path, failpoint):
    chance = random.Random(failpoint)
    first_alone = failpoint.startswith(("after_manifest", "after_directory"))  # who publishes
    rank = 0 if first_alone else chance.randrange(3)
    kill_and_lose(world, tmp_path, failpoint, rank, chance.randrange(3))


def kill_and_lose(world, tmp_path, failpoint, rank, lost):
    """What was durable anywhere is there again, with the bits of the undisturbed run."""
    order = {"kind": "fsdp", "root": tmp_path / "run", "nodes": [0, 1, 2], "steps": STEPS}
    said = world.run(
        3, base_every=3, keep_last=1, pause=0.05, unit_bytes=2000, failpoint=[rank, failpoint], **order
    )
    assert said[rank]["code"] == -9, said
    told = max(each.get("durable", -1) for each in said)
    shutil.rmtree(tmp_path / f"run-{lost}", ignore_errors=True)
    rest = world.run(3, **order)
    for before, after in zip(world.run_undisturbed(3, kind="fsdp", steps=STEPS), rest, strict=True):
        assert after.get("finished"), after.get("trace") or after
        assert rest[0]["resumed"] == after["resumed"] >= told
        assert after["losses"] == before["losses"][after["resumed"] :]
        assert after["digests"].items() <= before["digests"].items()
