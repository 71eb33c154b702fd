"""Ranks that train out of core: one is killed, and all go on to the end of a run that nobody disturbed."""

from __future__ import annotations

import random
import time

import pytest

from combined import one_in, some_of
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
    """What a run takes that nobody disturbs; not the first, which waits until torch is loaded."""
    for name in "first", "second":
        root, started = tmp_path_factory.mktemp(name), time.perf_counter()
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


def killed(world, root, options, **how):
    said = world.run(RANKS, root=root, steps=STEPS, micro_batches=COUNT, options=options, **how)
    assert {each["code"] for each in said} in ({0, -9}, {-9}), said
    for each in said:
        assert each["code"] == -9 or each["error"].startswith("RankFailed"), each
    return said


@pytest.mark.campaign(keep=4)
@pytest.mark.crash
@pytest.mark.parametrize(
    "place, options",
    one_in(
        4,
        [(0, f"{name}:2") for name in failpoints.NAMES[:-1]]
        + [(1, f"{name}:{count}") for name in failpoints.NAMES[:2] for count in (1, 9, 16)],
        OPTIONS,
    ),
    ids=str,
)
def test_a_rank_is_killed_at_a_failpoint(world, tmp_path, place, options):
    rank, failpoint = place
    said = killed(world, tmp_path, options, failpoint=[rank, failpoint])
    go_on_to_the_end(world, tmp_path, options, said)


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", some_of(5, range(12)))
def test_a_rank_is_killed_at_any_moment(world, tmp_path, seed, seconds):
    chance, said = random.Random(seed), []
    options = chance.choice(OPTIONS) | SOON
    for _ in range(2):
        moment = [chance.randrange(RANKS), chance.uniform(0, seconds)]
        made = world.run(
            RANKS, root=tmp_path, steps=STEPS, micro_batches=COUNT, options=options, kill_after=moment
        )
        said += made
    go_on_to_the_end(world, tmp_path, options, said)


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", some_of(7, range(20)))
def test_a_rank_is_killed_at_any_moment_over_drives_that_change(world, tmp_path, seed, seconds):
    """Each time over other drives, which what is killed may be moving files to."""
    chance, said, root = random.Random(100 + seed), [], tmp_path / "run"
    lists = [[str(tmp_path / name) for name in names] for names in (["one"], ["two"], ["two", "one"], [])]
    options = chance.choice(OPTIONS) | SOON
    for used in chance.sample(lists, 3):
        moment = [chance.randrange(RANKS), chance.uniform(0, seconds)]
        said += world.run(
            RANKS, root=root, steps=STEPS, micro_batches=COUNT, options=options | {"drives": used}, rates={},
            kill_after=moment,
        )  # fmt: skip
    go_on_to_the_end(world, root, options | {"drives": chance.choice(lists)}, said)
