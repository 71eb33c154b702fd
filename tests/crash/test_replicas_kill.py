"""Of two ranks with a replica each a trainer, a replica or all trainers are killed; all go on from one step."""

from __future__ import annotations

import random
import shutil
import time

import pytest

from combined import some_of
from dist.world import World
from holdfast import failpoints
from holdfast.checkpoint.replica import shared_memory
from holdfast.events import read_events

STEPS = 40
ONCE = ("after_timeline_opened", "after_state_handed", "after_manifest_write", "after_manifest_rename")
"""A trainer of any rank arrives at these once; the replica of the first rank alone at the commit's again."""

OF_THE_FIRST = (
    "after_manifest_sync", "after_directory_sync", "before_retire", "after_retire_unlink", "after_retire_sync",
)  # fmt: skip
"""The first rank alone publishes and retires."""

NOT_HERE = ("after_gradient_copied", "before_replica_kept", "after_replica_kept")
"""The first is of one process; at the others replicas arrive whose trainer is dead."""

ARRIVED_AT = [
    (rank, failpoint)
    for failpoint in (*failpoints.NAMES, *failpoints.REPLICA)
    for rank in ((0,) if failpoint in OF_THE_FIRST else (0, 1))
    if failpoint not in NOT_HERE
]


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.fixture(autouse=True)
def nothing_is_left_in_memory(tmp_path):
    yield
    assert not list(
        shared_memory.MEMORY.glob(shared_memory.place_of(tmp_path, shared_memory.MEMORY).name + "*")
    )


def run(world, root, kind, **order):
    return world.run(
        2, kind=kind, root=root, steps=STEPS, replica=True, deadline_seconds=30, keep_last=1, **order
    )


def go_on_to_the_end(world, root, kind, at_least, **order):
    rest = run(world, root, kind, **order)
    for before, after in zip(world.run_undisturbed(2, kind=kind, steps=STEPS), rest, strict=True):
        assert after.get("finished"), after.get("trace") or after
        assert rest[0]["resumed"] == after["resumed"] >= at_least
        assert after["losses"] == before["losses"][after["resumed"] :]
        assert after["digests"].items() <= before["digests"].items()


def told(said, what):
    return max((each.get(what, -1) for each in said), default=-1)


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", some_of(4, range(10)))
def test_trainers_are_killed_at_random_moments(world, tmp_path, seed):
    """One of them or both, three times in turn: what survives is there, from memory."""
    chance, survives, killed = random.Random(seed), -1, 0
    kind, order = chance.choice(["ddp", "fsdp"]), {"base_every": 3 + 4 * seed, "pause": 0.01}
    while killed < 3:
        ranks = chance.choice([["0"], ["1"], ["0", "1"]])
        said = run(
            world, tmp_path, kind, killed_in={rank: chance.uniform(0.0, 1.5) for rank in ranks}, **order
        )
        assert all(each.get("resumed", STEPS) >= survives for each in said)
        survives = max(survives, told(said, "survives"))
        if all(each["code"] == 0 and each.get("finished") for each in said):
            shutil.rmtree(tmp_path)  # it came to its end before
            survives = -1
        killed += any(each["code"] == -9 for each in said)
    go_on_to_the_end(world, tmp_path, kind, survives, **order)


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("rank, failpoint", some_of(2, ARRIVED_AT))
def test_whoever_arrives_at_a_failpoint_is_killed(world, tmp_path, failpoint, rank):
    """Trainer or replica of one rank, whichever comes there first."""
    chance = random.Random(f"{failpoint} {rank}")
    kind, arrival = chance.choice(["ddp", "fsdp"]), chance.choice([1, 2, 4])
    order = {"base_every": 3, "unit_bytes": 2000}
    said = run(
        world, tmp_path, kind, failpoint=[rank, f"{failpoint}:{1 if failpoint in ONCE else arrival}"], **order
    )
    assert said[rank]["code"] == -9 or "ReplicaDied" in said[rank]["error"], said
    go_on_to_the_end(world, tmp_path, kind, told(said, "durable"), **order)


@pytest.mark.campaign(cover=True)
@pytest.mark.crash
@pytest.mark.parametrize("failpoint, whole", [("before_replica_kept", False), ("after_replica_kept", True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_is_killed_while_it_keeps_a_dead_trainers_state(world, tmp_path, rank, failpoint, whole):
    said = run(
        world, tmp_path, "fsdp", base_every=1000, failpoint=[rank, failpoint], killed_after={"0": 25, "1": 25}
    )
    assert [each["code"] for each in said] == [-9, -9]
    time.sleep(1.0)
    go_on_to_the_end(world, tmp_path, "fsdp", 24 if whole else 0, base_every=1000)
    found = [event["event"] for event in read_events(tmp_path / "events.jsonl")].count("resumed")
    assert found == whole


@pytest.mark.campaign(cover=True)
@pytest.mark.crash
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["damaged", "removed"])
def test_what_one_replica_kept_is_damaged_or_gone(world, tmp_path, rank, what):
    said = run(world, tmp_path, "ddp", base_every=10, killed_after={"0": 25, "1": 25}, pause=0.03)
    assert [each["code"] for each in said] == [-9, -9]
    while [event["event"] for event in read_events(tmp_path / "events.jsonl")].count("kept") < 2:
        time.sleep(0.01)
    place = shared_memory.place_of(tmp_path, shared_memory.MEMORY, f".rank-{rank:05d}") / "state"
    if what == "removed":
        shutil.rmtree(place)
    else:
        for file in (place / "data").iterdir():
            data = bytearray(file.read_bytes())
            data[-100 if any(data[-100:]) else 4100] ^= 1
            file.write_bytes(data)
    go_on_to_the_end(world, tmp_path, "ddp", told(said, "durable"), base_every=1000)
    assert not [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "resumed"]
