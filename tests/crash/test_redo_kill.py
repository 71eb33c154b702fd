"""Training that guesses that nothing is clipped, killed by SIGKILL while it updates again what it guessed wrong.

What a guess has written is in files that no commit names, and so is what is written over it. Whatever a kill finds,
every listed commit is the state of its step, and the run ends bit for bit as one that nobody disturbed and that guessed
nothing.
"""

from __future__ import annotations

import random

import pytest

from combined import CAMPAIGN, one_in
from crash_run import ON_SSD, STEPS, end, kill_often
from holdfast import failpoints

WAYS = [
    {},
    ON_SSD,
    {"retain": 1},
    {"delayed_fraction": 0.5, "retain": 1, **ON_SSD},
    {"optimizer_on_host": 1.0, "params_on_host": 1.0},
]
SLOW = {"write_limit": 3 << 20}
"""What is written of a step takes longer than the next step's forward pass."""


def kill_at_random(server, reference, text, folder, rng, kills):
    def orders(number):
        order = {"root": folder / f"run{number}", "text": text, "clipping": "speculate"}
        return order | rng.choice(WAYS) | SLOW, order | rng.choice([{"clipping": "defer"}, *WAYS])

    kill_often(server, reference, orders, rng, kills, 3 * reference.seconds)


@pytest.mark.slow
def test_killed_at_a_few_random_moments_and_resumed_with_and_without_guesses(
    server, reference, text, tmp_path
):
    kill_at_random(server, reference, text, tmp_path, random.Random(1), 3)


@pytest.mark.campaign
@pytest.mark.crash
def test_killed_at_many_random_moments(server, reference, text, tmp_path):
    kill_at_random(server, reference, text, tmp_path, random.Random(2), 50 if CAMPAIGN else 5)


def kill_at_failpoint(server, reference, text, folder, failpoint, arrival, way):
    order = {"root": folder / "run", "text": text, "clipping": "speculate"}
    outcome = server.run(**order, **way, **SLOW, steps=STEPS, failpoint=f"{failpoint}:{arrival}")
    assert outcome.killed, "the failpoint was never reached"
    end(server, reference, order, outcome.durable)


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", failpoints.REDO)
def test_killed_while_a_block_is_updated_again(server, reference, text, tmp_path, failpoint):
    kill_at_failpoint(server, reference, text, tmp_path, failpoint, 6, {"retain": 1})


@pytest.mark.slow
def test_killed_where_every_block_is_updated_again_at_each_commit(server, reference, text, tmp_path):
    """Four blocks, guessed and made again, and what is no block: in each of these steps nine files are synced."""
    order = {"root": tmp_path / "run", "text": text, "clipping": "speculate", "steps": 5, **ON_SSD}
    outcome = server.run(**order, failpoint=f"before_data_sync:{5 + 9 * 4}")
    assert outcome.killed and outcome.durable <= 4, outcome
    outcome = server.run(
        **(order | {"root": tmp_path / "other"}), failpoint=f"before_data_sync:{5 + 9 * 5 + 1}"
    )
    assert outcome.finished, outcome


@pytest.mark.campaign(keep=7)
@pytest.mark.crash
@pytest.mark.parametrize(
    "failpoint, way, arrival",
    one_in(
        12,
        [*failpoints.REDO, *(n for n in failpoints.NAMES if n != "after_timeline_opened")],
        WAYS,
        [1, 3, 4, 8],
    ),
    ids=str,
)
def test_killed_at_every_failpoint(server, reference, text, tmp_path, failpoint, way, arrival):
    kill_at_failpoint(server, reference, text, tmp_path, failpoint, arrival, way)
