"""One of two ranks is killed at a failpoint; both go on from one step, not before what was acknowledged anywhere."""

from __future__ import annotations

import random

import pytest

from combined import some_of
from dist.world import World
from holdfast import failpoints

STEPS = 28
"""Enough for a base that was begun after the first segment ended: that segment goes then."""


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


@pytest.mark.campaign(keep=4)
@pytest.mark.crash
@pytest.mark.parametrize(
    ("rank", "failpoint"),
    some_of(
        3,
        [(0, name) for name in (*failpoints.NAMES, *failpoints.JOURNAL)]
        + [(1, name) for name in ("before_data_sync", "after_data_sync", *failpoints.JOURNAL[:-1])]
        + [(rank, f"{name}:3") for rank in (0, 1) for name in failpoints.RECORDING],
    )
    + [(rank, name) for rank in (0, 1) for name in failpoints.RANKS],
)
def test_a_rank_is_killed_at_a_failpoint(world, tmp_path, failpoint, rank):
    kind = random.Random(f"{failpoint} {rank}").choice(["ddp", "fsdp"])
    of_recording = (
        failpoint.partition(":")[0] in failpoints.RECORDING
    )  # whose third is soon met in smaller units
    said = world.run(
        2,
        kind=kind,
        root=tmp_path,
        steps=STEPS,
        base_every=3,
        keep_last=1,
        pause=0.05,
        unit_bytes=300 if of_recording else 2000,
        failpoint=[rank, failpoint],
    )
    assert said[rank]["code"] == -9
    go_on_to_the_end(world, tmp_path, kind, said)


@pytest.mark.crash
@pytest.mark.parametrize("seed", some_of(6, range(12)))
def test_a_rank_is_killed_at_any_step(world, tmp_path, seed):
    chance = random.Random(seed)
    kind, said = chance.choice(["ddp", "fsdp"]), []
    for _ in range(3):
        kill = [chance.randrange(2), chance.randrange(1, STEPS)]
        said += world.run(2, kind=kind, root=tmp_path, steps=STEPS, base_every=3, pause=0.01, kill=kill)
    go_on_to_the_end(world, tmp_path, kind, said)
