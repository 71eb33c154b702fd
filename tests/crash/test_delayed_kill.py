"""Training whose updates are delayed, killed by SIGKILL and resumed under another fraction.

A step's commit waits for its delayed updates, which run beside the next step: so a kill finds them done, half
done or not begun. Whatever it finds, every listed commit is the state of its step, and the run ends bit for bit
as one that nobody disturbed and that delayed nothing.
"""

from __future__ import annotations

import random

import pytest

from combined import CAMPAIGN, one_in
from crash_run import ON_SSD, STEPS, Reference, end, kill_often
from holdfast import failpoints
from holdfast.store.run_store import LocalStore

UNCLIPPED = {"clip_norm": None}
WAYS = [
    {"delayed_fraction": 0.25, **ON_SSD},
    {"delayed_fraction": 0.5},
    {"delayed_fraction": 0.5, "retain": 1, "commit_every": 3},
    {"delayed_fraction": 1.0, **ON_SSD},
    {"delayed_fraction": 1.0, "retain": 1},
]
SLOW = {"write_limit": 3 << 20}
"""What is written of a step takes longer than the next step's forward pass."""


@pytest.fixture(scope="module")
def undelayed(server, text, tmp_path_factory):
    """Every step of a run that delays nothing and that nobody disturbed."""
    root = tmp_path_factory.mktemp("undelayed") / "run"
    outcome = server.run(root=root, text=text, steps=STEPS, retain=STEPS + 1, **UNCLIPPED)
    assert outcome.finished, outcome
    return Reference(LocalStore.read(root), outcome.losses, outcome.seconds)


def kill_at_random(server, undelayed, text, folder, rng, kills):
    def orders(number):
        order = {"root": folder / f"run{number}", "text": text, **UNCLIPPED}
        return order | rng.choice(WAYS) | SLOW, order | rng.choice([{}, *WAYS])

    kill_often(server, undelayed, orders, rng, kills, 3 * undelayed.seconds)


@pytest.mark.slow
def test_killed_at_a_few_random_moments_and_resumed_under_another_fraction(server, undelayed, text, tmp_path):
    kill_at_random(server, undelayed, text, tmp_path, random.Random(1), 4)


@pytest.mark.campaign
@pytest.mark.crash
def test_killed_at_many_random_moments(server, undelayed, text, tmp_path):
    kill_at_random(server, undelayed, text, tmp_path, random.Random(2), 50 if CAMPAIGN else 5)


FEW = [("after_data_sync", 8), ("before_data_sync", 12), ("after_manifest_rename", 3)]


def kill_at_failpoint(server, undelayed, text, folder, failpoint, arrival, way):
    order = {"root": folder / "run", "text": text, **UNCLIPPED}
    outcome = server.run(**order, **way, **SLOW, steps=STEPS, failpoint=f"{failpoint}:{arrival}")
    assert outcome.killed, "the failpoint was never reached"
    end(server, undelayed, order, outcome.durable)


@pytest.mark.slow
@pytest.mark.parametrize("failpoint, arrival", FEW)
def test_killed_at_a_failpoint(server, undelayed, text, tmp_path, failpoint, arrival):
    kill_at_failpoint(server, undelayed, text, tmp_path, failpoint, arrival, {"delayed_fraction": 0.5})


@pytest.mark.campaign(keep=6)
@pytest.mark.crash
@pytest.mark.parametrize(
    "way, failpoint", one_in(4, WAYS, [n for n in failpoints.NAMES if n != "after_timeline_opened"]), ids=str
)
def test_killed_at_every_failpoint(server, undelayed, text, tmp_path, failpoint, way):
    kill_at_failpoint(server, undelayed, text, tmp_path, failpoint, 2, way)
