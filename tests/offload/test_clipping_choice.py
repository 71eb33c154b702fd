"""``clipping="auto"``: each step waits for the norm or guesses it, whichever is faster, with the same bits."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast.offload.setup import run_planning, step_planning
from holdfast.offload.step_maker import ClippingChoice
from holdfast.quantities import MiB
from offload.test_clipping import engine_of
from training import batches


def spent(clips, waiting=1.0, right=0.7, wrong=1.5, noise=0.02):
    """The seconds of each step of a simulated machine, and the ways in which they were done.

    Args:
        clips: By step, whether it is clipped.
        waiting: Seconds of a step that waits.
        right: Seconds of a step that guesses right.
        wrong: Seconds of a step that guesses wrong.
        noise: The relative deviation of each.
    """
    choice, chance, seconds, modes = ClippingChoice(), random.Random(0), [], []
    for clipped in clips:
        mode = choice.mode
        time = waiting if mode == "defer" else wrong if clipped else right
        seconds.append(time * chance.gauss(1, noise))
        modes.append(mode)
        choice.over(mode, clipped, seconds[-1])
    return seconds, modes


def test_run_that_clips_every_step_never_guesses():
    assert set(spent([True] * 500)[1]) == {"defer"}


def test_run_that_never_clips_guesses_soon():
    seconds, modes = spent([False] * 200)
    assert modes[20:] == ["speculate"] * 180
    assert sum(seconds) < 1.1 * 200 * 0.7


def test_guessing_that_is_slower_is_left_after_a_try():
    seconds, modes = spent([False] * 300, right=1.1)
    assert modes.count("speculate") < 12 and modes[-200:] == ["defer"] * 200
    assert sum(seconds) < 1.02 * 300


def test_clipping_that_begins_again_ends_the_guesses():
    _, modes = spent([False] * 60 + [True] * 60 + [False] * 60)
    assert modes[50] == "speculate" and modes[80] == "defer" and modes[-1] == "speculate"


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_choice_is_near_the_better_way(share):
    chance = random.Random(1)
    clips = [chance.random() < share for _ in range(1000)]
    seconds, _ = spent(clips)
    guessing = sum(1.5 if clipped else 0.7 for clipped in clips)
    assert sum(seconds) < 1.06 * min(1000, guessing)


def ways_of(engine):
    return {shape.clipping for _, shape in engine.operations}


def test_ways_are_chosen_unless_one_is_given(tmp_path):
    with engine_of(tmp_path, clip_norm=1.0) as engine:
        assert engine._rules.clipping == "auto"


@pytest.mark.slow
def test_a_budget_without_room_for_guesses_waits_for_the_norm(tmp_path, monkeypatch):
    monkeypatch.setattr(step_planning, "process_bytes", lambda: 400 * MiB)
    options = {"clip_norm": 1e6, "sample": batches(0, 1)[0], "micro_batches": 2, "optimizer_on_host": 0.0}
    needed = {}
    for mode in ("defer", "speculate"):
        with engine_of(tmp_path / mode, clipping=mode, **options) as engine:
            needed[mode] = engine._plan.held_bytes + engine._plan.memory.host_bytes
    assert needed["defer"] < needed["speculate"]
    for mode in ("defer", "speculate"):
        budget = holdfast.Budget(host=needed[mode])
        with engine_of(tmp_path / f"auto {mode}", budget=budget, **options) as engine:
            for step in range(12):
                engine.step(batches(step, 2))
            assert ("speculate" in ways_of(engine)) == (mode == "speculate")


def test_memory_that_is_not_free_is_left_for_the_norm(tmp_path, monkeypatch):
    """Without a budget."""
    options = {"clip_norm": 1.0, "sample": batches(0, 1)[0], "micro_batches": 2}
    for free, mode in ((1 << 40, "auto"), (1 << 10, "defer")):
        monkeypatch.setattr(run_planning, "free_host_bytes", lambda free=free: free)
        with engine_of(tmp_path / mode, **options) as engine:
            assert engine._rules.clipping == mode


def test_gradients_wait_on_the_ssd_where_memory_is_short(tmp_path, monkeypatch):
    """Without a budget and a sample, with the same bits."""
    losses = []
    for free, spills in ((1 << 40, False), (1 << 10, True)):
        monkeypatch.setattr(run_planning, "free_host_bytes", lambda free=free: free)
        with engine_of(tmp_path / f"{free}", clip_norm=1.0) as engine:
            losses.append([engine.step(batches(step, 2)) for step in range(2)])
            assert (("ssd_write", "store_grads") in engine.traffic()) == spills
    assert losses[0] == losses[1]


def test_ways_do_not_change_without_a_commit_at_each_step(tmp_path):
    with engine_of(tmp_path, clip_norm=1.0, clipping="auto", commit_every=2) as engine:
        for step in range(2):
            engine.step(batches(step, 2))
        assert ways_of(engine) == {"defer"}
