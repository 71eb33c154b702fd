"""Training by MeZO, killed by SIGKILL and resumed.

A commit lacks its last update and has it as a number; a run that is closed writes its last step once more, whole. Of
whichever form a kill leaves a commit, it is the state of its step, and the run ends as one that nobody disturbed.
"""

from __future__ import annotations

import random

import pytest

from combined import CAMPAIGN
from crash_run import MIXED, ON_SSD, STEPS, Reference, end, kill_and_end
from fork_server import at_each, at_random
from holdfast import failpoints
from holdfast.store.run_store import LocalStore

MEZO = {"mezo": True, "clip_norm": None}
WAYS = [
    {},
    ON_SSD,
    {"retain": 1},
    {"commit_every": 3, "retain": 1},
    dict.fromkeys(MIXED, 1.0),
]


@pytest.fixture(scope="module")
def undisturbed(server, text, tmp_path_factory):
    root = tmp_path_factory.mktemp("zeroth") / "run"
    outcome = server.run(root=root, text=text, steps=STEPS, retain=STEPS + 1, **MEZO)
    assert outcome.finished, outcome
    return Reference(LocalStore.read(root), outcome.losses, outcome.seconds)


def kill(server, undisturbed, text, folder, kills, chance):
    kill_and_end(server, undisturbed, folder, kills, lambda _: {"text": text, **MEZO, **chance.choice(WAYS)})


@pytest.mark.slow
def test_killed_at_random_moments(server, undisturbed, text, tmp_path):
    chance = random.Random(1)
    kills = [at_random(chance, undisturbed.seconds)] * (50 if CAMPAIGN else 3)
    kill(server, undisturbed, text, tmp_path, kills, chance)


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_every_failpoint_in_turn(server, undisturbed, text, tmp_path, seed):
    kill(server, undisturbed, text, tmp_path, at_each(failpoints.NAMES, seed), random.Random(seed))


@pytest.mark.crash
def test_killed_at_every_failpoint_of_the_last_commit(server, undisturbed, text, tmp_path):
    """After the manifests of the beginning and of all steps comes that of the last step once more, with whole files."""
    for name in failpoints.NAMES[2:6]:
        order = {"root": tmp_path / name, "text": text, **MEZO}
        outcome = server.run(**order, steps=STEPS, failpoint=f"{name}:{STEPS + 2}")
        assert outcome.killed, name
        end(server, undisturbed, order, outcome.durable)
