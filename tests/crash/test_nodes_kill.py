"""Nodes with a directory each: a rank is killed at a failpoint, and a directory removed, as if its node were lost."""

from __future__ import annotations

import random
import shutil

import pytest

from dist.world import World
from holdfast import failpoints

STEPS = 40
EVERY = [*failpoints.NODES, *failpoints.RANKS, *failpoints.NAMES, *failpoints.JOURNAL]
FIRST_ALONE = ("after_manifest", "after_directory")
"""Where the first rank alone arrives, which publishes."""


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize(
    "names", [failpoints.NODES, *([name] for name in EVERY)], ids=lambda names: names[-1]
)
def test_ranks_are_killed_at_failpoints_and_a_node_is_lost(world, tmp_path, names):
    """What was durable anywhere is there again, with the bits of the undisturbed run."""
    chance, told = random.Random(names[-1]), -1
    order = {"kind": "fsdp", "nodes": [0, 1, 2], "steps": STEPS}
    for name in names:
        rank = 0 if name.startswith(FIRST_ALONE) else 1 + chance.randrange(2)
        said = world.run(
            3,
            root=tmp_path / "run",
            base_every=3,
            keep_last=1,
            pause=0.05,
            unit_bytes=2000,
            failpoint=[rank, name],
            **order,
        )
        assert said[rank]["code"] == -9, said
        told = max(told, *(each.get("durable", -1) for each in said))
    shutil.rmtree(tmp_path / f"run-{chance.randrange(3)}", ignore_errors=True)
    rest = world.run(3, root=tmp_path / "run", **order)
    for before, after in zip(world.run_undisturbed(3, kind="fsdp", steps=STEPS), rest, strict=True):
        assert after.get("finished"), after.get("trace") or after
        assert rest[0]["resumed"] == after["resumed"] >= told
        assert after["losses"] == before["losses"][after["resumed"] :]
        assert after["digests"].items() <= before["digests"].items()
