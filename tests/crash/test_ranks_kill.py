"""One of two ranks is killed at a failpoint; both go on from one step, not before what was acknowledged anywhere."""

from __future__ import annotations

import random

import pytest

from dist.world import World
from holdfast import failpoints

STEPS = 28
"""Enough for a base that was begun after the first segment ended: that segment goes then."""
PLACES = [
    *((0, name) for name in (*failpoints.NAMES, *failpoints.JOURNAL)),
    *((1, name) for name in ("before_data_sync", "after_data_sync", *failpoints.JOURNAL[:-1])),
    *((rank, f"{name}:3") for rank in (0, 1) for name in failpoints.RECORDING),
]
"""Ranks, and the failpoints that they arrive at."""


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


def go_on_to_the_end(world, root, kind, said):
    rest = world.run(2, kind=kind, root=root, steps=STEPS)
    told = max((each.get("durable", -1) for each in said), default=-1)
    for before, after in zip(world.run_undisturbed(2, kind=kind, steps=STEPS), rest, strict=True):
        assert after.get("finished"), after.get("trace") or after
        assert rest[0]["resumed"] == after["resumed"] >= told
        assert after["losses"] == before["losses"][after["resumed"] :]
        assert after["digests"].items() <= before["digests"].items()


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(12))
def test_ranks_are_killed_at_failpoints_in_turn(world, tmp_path, seed):
    """Where a process comes to its end before, another directory is the next one's."""
    chance, said, number = random.Random(seed), [], 0
    kind = chance.choice(["ddp", "fsdp"])
    places = [*chance.sample(PLACES, 2), *((rank, name) for rank in (0, 1) for name in failpoints.RANKS)]
    for rank, failpoint in places:
        # the third step of recording is soon met in smaller units
        order = {"kind": kind, "steps": STEPS, "base_every": 3, "keep_last": 1, "pause": 0.05,
                 "unit_bytes": 300 if ":" in failpoint else 2000, "failpoint": [rank, failpoint]}  # fmt: skip
        now = world.run(2, root=tmp_path / str(number), **order)
        if now[rank]["code"] == 0:
            number, said = number + 1, []
            now = world.run(2, root=tmp_path / str(number), **order)
        assert now[rank]["code"] == -9, (rank, failpoint)
        said += now
    go_on_to_the_end(world, tmp_path / str(number), kind, said)


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_is_killed_at_any_step(world, tmp_path, seed):
    chance = random.Random(seed)
    kind, said = chance.choice(["ddp", "fsdp"]), []
    for _ in range(2):
        kill = [chance.randrange(2), chance.randrange(1, STEPS)]
        said += world.run(2, kind=kind, root=tmp_path, steps=STEPS, base_every=3, pause=0.01, kill=kill)
    go_on_to_the_end(world, tmp_path, kind, said)
