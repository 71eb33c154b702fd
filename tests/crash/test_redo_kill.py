"""Training that guesses that nothing is clipped, killed by SIGKILL while it updates again what it guessed wrong.

What a guess has written is in files that no commit names, and so is what is written over it. Whatever a kill finds,
every listed commit is the state of its step, and the run ends bit for bit as one that nobody disturbed and that guessed
nothing.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from combined import CAMPAIGN
from crash_run import ON_SSD, kill_and_end
from fork_server import at_each, at_random
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


def any_way(chance, text, _):
    """How a process is made: some do not guess."""
    ways = [{"clipping": "defer"}, *({"clipping": "speculate", **way, **SLOW} for way in WAYS)]
    return {"text": text, **chance.choice(ways)}


@pytest.mark.campaign
@pytest.mark.crash
def test_killed_at_random_moments_and_resumed_with_and_without_guesses(server, reference, text, tmp_path):
    chance = random.Random(1)
    kills = [at_random(chance, 3 * reference.seconds)] * 50
    kill_and_end(server, reference, tmp_path, kills, partial(any_way, chance, text))


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(10 if CAMPAIGN else 1))
def test_killed_at_every_failpoint_in_turn(server, reference, text, tmp_path, seed):
    kills = at_each([*failpoints.REDO, *failpoints.NAMES], seed)
    kill_and_end(server, reference, tmp_path, kills, partial(any_way, random.Random(seed), text))


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
