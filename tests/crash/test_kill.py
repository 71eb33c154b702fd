"""Training killed by SIGKILL: at random moments, at every failpoint, and again while it resumes.

After each kill nothing acknowledged is lost and every listed commit is the state of its step, bit for bit; and
the run ends as one ends that nobody disturbed: parameters, optimizer state, random generators, position in the
text, schedule, losses.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from combined import CAMPAIGN
from crash_run import MIXED, ON_SSD, STEPS, atoms_of, end, kill_and_end
from fork_server import at_each, at_random
from holdfast import failpoints
from holdfast.store.run_store import LocalStore

KILLS, RESUMED = (50, 25) if CAMPAIGN else (4, 6)
IN_HOST = dict.fromkeys(MIXED, 1.0)
WAYS = [
    {},
    {"commit_every": 3},
    {"retain": 1},
    {**ON_SSD, "schedule": "horizontal"},
    {**IN_HOST, "retain": 1, "commit_every": 3},
]
"""How a run may be made. What it computes is the same in all."""


def any_way(chance, text, on_drives, root):
    """Another way for each process, and other drives where there are any: some are killed with their files on the
    way."""
    order = {"text": text, **chance.choice(WAYS)}
    lists = [[f"{root}-{name}" for name in names] for names in ("", "a", "b", "ab", "ba")]
    return order | {"drives": chance.choice(lists)} if on_drives else order


@pytest.mark.slow
@pytest.mark.parametrize("on_drives", [False, True])
def test_killed_at_random_moments(server, reference, text, tmp_path, on_drives):
    chance = random.Random(1 + on_drives)
    kills = [at_random(chance, reference.seconds)] * KILLS
    order_of = partial(any_way, chance, text, on_drives)
    reader = LocalStore.read(kill_and_end(server, reference, tmp_path, kills, order_of))
    atoms = atoms_of(reader, reader.head())
    assert len(atoms) > 100 and atoms.items() <= reference.steps[STEPS].items()


@pytest.mark.crash
def test_killed_again_and_again_while_it_resumes(server, reference, text, tmp_path):
    """No process is given the time to come far: some die before their first step. The time is longer after one
    that got nowhere and shorter after one that did. Every kill counts, so that this ends at any pace."""
    rng, number, newest, kills, window = random.Random(3), 0, -1, 0, reference.seconds / 3
    while kills < RESUMED:
        order = {"root": tmp_path / f"run{number}", "text": text}
        outcome = server.run(**order, steps=STEPS, kill_after=rng.uniform(0, window))
        assert outcome.killed or outcome.finished, outcome
        assert outcome.resumed is None or outcome.resumed >= newest
        came = max(0, outcome.durable - newest)
        newest, kills = newest + came, kills + outcome.killed
        window *= 0.9**came if came else 1.3
        reference.check_run(order["root"])
        if outcome.finished:
            end(server, reference, order, newest)
            number, newest = number + 1, -1
            assert number < RESUMED, "the processes end before they are killed"
    end(server, reference, order, newest)


@pytest.mark.campaign(keep=3)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("way", [{}, {"commit_every": 3}, {"retain": 1, **ON_SSD}], ids=str)
def test_killed_at_every_failpoint_in_turn(server, reference, text, tmp_path, way, seed):
    kills = at_each(failpoints.NAMES, seed)
    kill_and_end(server, reference, tmp_path, kills, lambda _: {"text": text, **way})


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_every_failpoint_while_its_files_move(server, reference, text, tmp_path, seed):
    """Each process wants other drives than the one before, and is killed at the next failpoint."""
    kills, order_of = (
        at_each(failpoints.NAMES, seed),
        partial(any_way, random.Random(seed), text, True),
    )
    kill_and_end(server, reference, tmp_path, kills, order_of)


@pytest.mark.slow
def test_a_skipped_step_is_counted_by_the_commit_that_it_ends_in(server, text, tmp_path):
    """The step after the kill finds the same count as in a run that was not killed."""
    order = {"root": tmp_path / "run", "text": text, "nan_at": 2}
    assert server.run(**order, steps=3, retain=9).acknowledged == [0, 1, 2, 3]
    assert server.run(**order, steps=5, retain=9).resumed == 3
    assert [progress["skipped_steps"] for progress in progress_of(order["root"])] == [1, 1, 1, 0, 0, 0]


def progress_of(root):
    reader = LocalStore.read(root)
    return [reader.load(ref).progress for ref in reader.commits()]
