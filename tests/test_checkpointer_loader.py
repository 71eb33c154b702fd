"""A script with dropout, shuffling, augmentation and workers goes on after an interruption, in mid-epoch and in a later
epoch, to the very losses and bits of one that was never interrupted, with any number of workers before and after."""

from __future__ import annotations

import random
from itertools import product

import pytest

from fork_server import ForkServer
from loader_run import BATCH, SAMPLES, STEPS, train


@pytest.fixture(scope="module")
def server():
    return ForkServer()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    outcome = server.run(loader=True, root=tmp_path_factory.mktemp("undisturbed"))
    assert outcome.finished, outcome.error
    assert STEPS * BATCH > 2 * SAMPLES and len(set(outcome.losses)) == STEPS
    return outcome


def run(root, **options):
    """In this process: what it said."""
    said = {}
    train(root, said=said.update, **options)
    return said


@pytest.mark.slow
@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("before, after", [(0, 0), (2, 2), (0, 2), (2, 0)])
@pytest.mark.parametrize("stop", random.Random(5).sample(range(1, STEPS), 4))
def test_interrupted_at_a_random_step_and_resumed(undisturbed, tmp_path, stop, before, after):
    first = run(tmp_path, steps=stop, num_workers=before, base_every=5)
    rest = run(tmp_path, num_workers=after, base_every=5)
    assert rest["resumed"] == stop
    assert first["losses"] + rest["losses"] == undisturbed.losses
    assert rest["digest"] == undisturbed.digest


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("num_workers, seed", [*product([0, 2], range(4))])
def test_killed_at_random_steps_until_it_is_done(server, undisturbed, tmp_path, num_workers, seed):
    chance, step = random.Random(seed), 0
    while True:
        step = chance.randint(step + 1, step + 6)
        outcome = server.run(
            loader=True, root=tmp_path, num_workers=num_workers, base_every=4,
            **({"from_step": step} if step <= STEPS else {}),
        )  # fmt: skip
        if outcome.finished:
            break
        assert outcome.killed, outcome.error
        again = server.run(loader=True, root=tmp_path, num_workers=num_workers, kill_after=0.15)
        assert again.killed or again.finished, again.error
        assert again.resumed is None or again.resumed >= outcome.durable
    assert outcome.digest == undisturbed.digest
    assert outcome.losses == undisturbed.losses[len(undisturbed.losses) - len(outcome.losses) :]
