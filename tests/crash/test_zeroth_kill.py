"""Training by MeZO, killed by SIGKILL and resumed.

A commit lacks its last update and has it as a number; a run that is closed writes its last step once more, whole. Of
whichever form a kill leaves a commit, it is the state of its step, and the run ends as one that nobody disturbed.
"""

from __future__ import annotations

import random

import pytest

from combined import CAMPAIGN, one_in
from crash_run import MIXED, ON_SSD, STEPS, Reference, end, kill_often
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


def kill_at_random(server, undisturbed, text, folder, rng, kills):
    def orders(number):
        order = {"root": folder / f"run{number}", "text": text, **MEZO}
        return order | rng.choice(WAYS), order | rng.choice(WAYS)

    kill_often(server, undisturbed, orders, rng, kills, undisturbed.seconds)


@pytest.mark.slow
def test_killed_at_a_few_random_moments(server, undisturbed, text, tmp_path):
    kill_at_random(server, undisturbed, text, tmp_path, random.Random(1), 3)


@pytest.mark.campaign
@pytest.mark.crash
def test_killed_at_many_random_moments(server, undisturbed, text, tmp_path):
    kill_at_random(server, undisturbed, text, tmp_path, random.Random(2), 50 if CAMPAIGN else 5)


@pytest.mark.campaign(keep=7)
@pytest.mark.crash
@pytest.mark.parametrize(
    "way, place",
    one_in(
        5,
        WAYS,
        [(name, 2) for name in failpoints.NAMES[:-1]] + [(name, STEPS + 2) for name in failpoints.NAMES[2:6]],
    ),
    ids=str,
)
def test_killed_at_every_failpoint_of_a_step_and_of_the_last_commit(
    server, undisturbed, text, tmp_path, way, place
):
    """After the manifests of the beginning and of all steps comes that of the last step once more, with whole files."""
    order = {"root": tmp_path / "run", "text": text, **MEZO}
    outcome = server.run(**order, **way, steps=STEPS, failpoint="{}:{}".format(*place))
    assert outcome.killed or way.get("commit_every") == 3, "the failpoint was never reached"
    end(server, undisturbed, order, outcome.durable)
