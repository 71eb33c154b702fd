"""Training killed by SIGKILL: at random moments, at every failpoint, and again while it resumes.

After each kill nothing acknowledged is lost and every listed commit is the state of its step, bit for bit; and
the run ends as one ends that nobody disturbed: parameters, optimizer state, random generators, position in the
text, schedule, losses.
"""

from __future__ import annotations

import random

import pytest

from combined import CAMPAIGN, one_in, some_of
from crash_run import MIXED, ON_SSD, STEPS, atoms_of, end, kill_often
from holdfast import failpoints
from holdfast.store.run_store import LocalStore

KILLS, RESUMED = (50, 25) if CAMPAIGN else (15, 8)
IN_HOST = dict.fromkeys(MIXED, 1.0)
WAYS = [
    {},
    {"commit_every": 3},
    {"retain": 1},
    {**ON_SSD, "schedule": "horizontal"},
    {**IN_HOST, "retain": 1, "commit_every": 3},
]
"""How a run may be made. What it computes is the same in all."""


def kill_at_random(server, reference, text, folder, rng, kills):
    """Each resumed in another way than it was made in."""

    def orders(number):
        order = {"root": folder / f"run{number}", "text": text}
        return order | rng.choice(WAYS), order | rng.choice(WAYS)

    kill_often(server, reference, orders, rng, kills, reference.seconds)


@pytest.mark.slow
def test_killed_at_a_few_random_moments(server, reference, text, tmp_path):
    kill_at_random(server, reference, text, tmp_path, random.Random(1), 3)
    reader = LocalStore.read(tmp_path / "run1")
    atoms = atoms_of(reader, reader.head())
    assert len(atoms) > 100 and atoms.items() <= reference.steps[STEPS].items()


@pytest.mark.campaign
@pytest.mark.crash
def test_killed_at_many_random_moments(server, reference, text, tmp_path):
    kill_at_random(server, reference, text, tmp_path, random.Random(2), KILLS)


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


ARRIVALS = dict.fromkeys(failpoints.NAMES, (1, 2, 7)) | {
    "before_data_sync": (1, 4, 6, 9, 13, 18, 31),  # 5 units: in the making, in steps 1, 1, 2, 3, 6
    "after_data_sync": (1, 5, 10, 22, 40),
    "after_timeline_opened": (1,),
}
"""Which arrivals at a failpoint end the process."""
KILLED = [(name, arrival) for name, arrivals in ARRIVALS.items() for arrival in arrivals]
FEW = [("after_data_sync", 9), ("after_manifest_rename", 3), ("after_retire_unlink", 2)]


def kill_at_failpoint(server, reference, order, failpoint, arrival):
    outcome = server.run(**order, steps=STEPS, failpoint=f"{failpoint}:{arrival}")
    assert outcome.killed, "the failpoint was never reached"
    end(server, reference, order, outcome.durable)


@pytest.mark.slow
@pytest.mark.parametrize("failpoint, arrival", FEW)
def test_killed_at_a_failpoint(server, reference, text, tmp_path, failpoint, arrival):
    kill_at_failpoint(server, reference, {"root": tmp_path / "run", "text": text}, failpoint, arrival)


@pytest.mark.crash
@pytest.mark.parametrize("way, place", one_in(4, [{}, {"retain": 1, **ON_SSD}], KILLED), ids=str)
def test_killed_at_every_failpoint(server, reference, text, tmp_path, way, place):
    order = {"root": tmp_path / "run", "text": text, **way}
    kill_at_failpoint(server, reference, order, *place)


@pytest.mark.crash
@pytest.mark.parametrize("failpoint", some_of(3, failpoints.NAMES))
def test_killed_at_every_failpoint_of_a_commit_every_three_steps(
    server, reference, text, tmp_path, failpoint
):
    order = {"root": tmp_path / "run", "text": text, "commit_every": 3}
    kill_at_failpoint(server, reference, order, failpoint, 1 if failpoint == "after_timeline_opened" else 2)


@pytest.mark.crash
def test_killed_at_each_failpoint_in_turn_of_one_run(server, reference, text, tmp_path):
    """Every process of the run is killed, each while it resumes from what the one before had left."""
    order, newest = {"root": tmp_path / "run", "text": text}, -1
    for failpoint in failpoints.NAMES:
        outcome = server.run(**order, steps=STEPS, failpoint=failpoint)
        assert outcome.killed and (outcome.resumed is None or outcome.resumed >= newest)
        newest = max(newest, outcome.durable)
        reference.check_run(order["root"])
    end(server, reference, order, newest)


@pytest.mark.slow
@pytest.mark.parametrize("failpoint, arrival", FEW)
def test_killed_at_a_failpoint_of_a_run_over_two_drives(
    server, reference, text, tmp_path, failpoint, arrival
):
    order = {"root": tmp_path / "run", "text": text, "drives": [tmp_path / "one"]}
    kill_at_failpoint(server, reference, order, failpoint, arrival)


def kill_on_drives(server, reference, text, folder, rng, kills):
    """Each begun on some drives, and ended on others: some are killed with their files on the way."""

    def orders(number):
        root = folder / f"run{number}"
        lists = [[folder / f"{name}{number}" for name in names] for names in ("", "a", "b", "ab", "ba")]
        order = {"root": root, "text": text}
        return tuple(order | {"drives": rng.choice(lists)} | rng.choice(WAYS) for _ in range(2))

    kill_often(server, reference, orders, rng, kills, reference.seconds)


@pytest.mark.slow
def test_killed_at_a_few_random_moments_on_drives_that_change(server, reference, text, tmp_path):
    kill_on_drives(server, reference, text, tmp_path, random.Random(5), 3)


@pytest.mark.campaign
@pytest.mark.crash
def test_killed_at_many_random_moments_on_drives_that_change(server, reference, text, tmp_path):
    kill_on_drives(server, reference, text, tmp_path, random.Random(6), KILLS)


@pytest.mark.crash
def test_killed_again_and_again_while_its_files_move(server, reference, text, tmp_path):
    """Each process wants other drives than the one before, and is killed at the next failpoint."""
    newest = -1
    lists = [[], [tmp_path / "a"], [tmp_path / "a", tmp_path / "b"], [tmp_path / "b"]]
    for number, failpoint in enumerate(failpoints.NAMES):
        order = {"root": tmp_path / "run", "text": text, "drives": lists[number % 4]}
        outcome = server.run(**order, steps=STEPS, failpoint=f"{failpoint}:{1 + number % 2}")
        assert not outcome.error, outcome
        newest = max(newest, outcome.durable)
        reference.check_run(tmp_path / "run")
    end(server, reference, order, newest)


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
