"""Ranks that train out of core: one is killed, and all go on to the end of a run that nobody disturbed."""

from __future__ import annotations

import random
import time

import pytest

from dist.offloading import plain
from dist.world import World
from holdfast import failpoints
from holdfast.store.run_store import LocalStore
from training import differing, read_atoms

STEPS, RANKS, COUNT = 8, 2, 2
OPTIONS = [
    {"clip_norm": 0.5},
    {"delayed_fraction": 0.5, "retain": 1, "commit_every": 2},
    {"clip_norm": 0.5, "clipping": "speculate", "params_on_host": 0.5, "optimizer_on_host": 0.5},
]
SOON = {"deadline_seconds": 20.0}
"""Where a rank is killed before all have found each other, the others wait for so long."""


@pytest.fixture(scope="module")
def world():
    with World("offloading") as world:
        yield world


@pytest.fixture(scope="module")
def seconds(world, tmp_path_factory):
    """What a run takes that nobody disturbs, in ranks that have loaded torch."""
    for number in range(2):
        started = time.perf_counter()
        root = tmp_path_factory.mktemp(f"undisturbed-{number}")
        world.run(RANKS, root=root, steps=STEPS, micro_batches=COUNT, options=OPTIONS[0])
    return time.perf_counter() - started


def go_on_to_the_end(world, root, options, said):
    """From a step that was not acknowledged anywhere in vain."""
    told = max((each.get("durable", -1) for each in said), default=-1)
    if (root / "commits").exists():
        reader = LocalStore.read(root, direct=False)
        for ref in reader.commits():
            assert reader.verify(reader.load(ref)) == []
    else:
        assert told == -1
    rest = world.run(RANKS, root=root, steps=STEPS, micro_batches=COUNT, options=options, rates={})
    losses, _, state = plain([(STEPS, RANKS, COUNT)], clip_norm=options.get("clip_norm"))
    for each in rest:
        assert each.get("finished"), each.get("trace") or each
        assert (each["resumed"] or 0) >= told
        assert each.get("losses", []) == losses[each["resumed"] or 0 :]
    assert differing(read_atoms(root), state) == []


PLACES = [
    *((0, f"{name}:2") for name in failpoints.NAMES[:-1]),
    *((1, f"{name}:{count}") for name in failpoints.NAMES[:2] for count in (1, 9)),
]


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(12))
def test_ranks_are_killed_at_failpoints_in_turn(world, tmp_path, seed):
    """Where a process comes to its end before, another directory is the next one's."""
    chance, said, number = random.Random(seed), [], 0
    options = OPTIONS[(seed + seed // 6) % 3] | SOON
    for rank, failpoint in chance.sample(PLACES, 3):
        order = {"steps": STEPS, "micro_batches": COUNT, "options": options, "failpoint": [rank, failpoint]}
        now = world.run(RANKS, root=tmp_path / str(number), **order)
        if now[rank]["code"] == 0:
            number, said = number + 1, []
            now = world.run(RANKS, root=tmp_path / str(number), **order)
        assert now[rank]["code"] == -9, (failpoint, now)
        for each in now:
            assert each["code"] == -9 or each["error"].startswith("RankFailed"), each
        said += now
    go_on_to_the_end(world, tmp_path / str(number), options, said)


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_is_killed_at_any_moment_over_drives_that_change(world, tmp_path, seed, seconds):
    """Each time over other drives, which what is killed may be moving files to."""
    chance, said, root = random.Random(100 + seed), [], tmp_path / "run"
    lists = [[str(tmp_path / name) for name in names] for names in (["one"], ["two"], ["two", "one"], [])]
    options = chance.choice(OPTIONS) | SOON
    for used in chance.sample(lists, 3):
        moment = [chance.randrange(RANKS), chance.uniform(0, 0.7 * seconds)]
        said += world.run(
            RANKS, root=root, steps=STEPS, micro_batches=COUNT, options=options | {"drives": used}, rates={},
            kill_after=moment,
        )  # fmt: skip
    assert any(each["code"] == -9 for each in said), said
    go_on_to_the_end(world, root, options | {"drives": chance.choice(lists)}, said)
