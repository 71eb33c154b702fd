"""Training whose updates are delayed, killed by SIGKILL and resumed under another fraction.

A step's commit waits for its delayed updates, which run beside the next step: so a kill finds them done, half
done or not begun. Whatever it finds, every listed commit is the state of its step, and the run ends bit for bit
as one that nobody disturbed and that delayed nothing.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from combined import CAMPAIGN
from crash_run import ON_SSD, STEPS, Reference, kill_and_end
from fork_server import at_each, at_random
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


def any_way(chance, text, _):
    """How a process is made: some delay nothing, and fast."""
    return {"text": text, **UNCLIPPED, **chance.choice([{}, *(way | SLOW for way in WAYS)])}


@pytest.mark.campaign
@pytest.mark.crash
def test_killed_at_random_moments_and_resumed_under_another_fraction(server, undelayed, text, tmp_path):
    chance = random.Random(1)
    kills = [at_random(chance, 3 * undelayed.seconds)] * 50
    kill_and_end(server, undelayed, tmp_path, kills, partial(any_way, chance, text))


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(10 if CAMPAIGN else 1))
def test_killed_at_every_failpoint_in_turn(server, undelayed, text, tmp_path, seed):
    """Each process delays another fraction."""
    order_of = partial(any_way, random.Random(seed), text)
    kill_and_end(server, undelayed, tmp_path, at_each(failpoints.NAMES, seed), order_of)
