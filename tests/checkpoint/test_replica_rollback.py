"""With a replica a living process goes back to a base, and the replica with it."""

from __future__ import annotations

import math

import pytest
import torch

from checkpoint.loops import same
from checkpoint.test_replica import events, forked, start, states_of
from holdfast.errors import BadInput, NoCommit

__all__ = ["forked"]


def trained(tmp_path, feature, steps, saved):
    """A loop after ``steps``, with a base of each step in ``saved``."""
    loop, checkpointer = start(tmp_path, feature, base_every=100)
    checkpointer.resume()
    for i in range(steps):
        loop.iteration(i, checkpointer.step)
        if checkpointer.steps_done in saved:
            checkpointer.save()
    return loop, checkpointer


def go_on(loop, checkpointer, steps):
    for i in range(checkpointer.steps_done, steps):
        loop.iteration(i, checkpointer.step)


@pytest.mark.parametrize("feature", ["batchnorm", "frozen"])
@pytest.mark.slow
def test_a_bad_loss_sends_trainer_and_replica_to_a_base(tmp_path, feature):
    states = states_of(feature)
    loop, checkpointer = trained(tmp_path, feature, 7, saved=(2, 4, 6))
    with checkpointer:
        guard = checkpointer.guard()
        assert guard.check(math.nan)  # before step 8, so step 6 at the latest
        assert checkpointer.steps_done == checkpointer.durable_step == 6
        assert same(loop.state(), states[6])
        go_on(loop, checkpointer, 7)
        assert guard.check(math.nan)
        assert (
            checkpointer.steps_done == checkpointer.durable_step == 4
        )  # two steps back, and the base before
        go_on(loop, checkpointer, 9)
        assert same(loop.state(), states[9])
        checkpointer.save()
        assert checkpointer.durable_step == 9
    assert not events(tmp_path, "drift")
    loop, checkpointer = start(tmp_path, feature)
    with checkpointer:
        assert checkpointer.resume() == 9
        assert same(loop.state(), states[9])


def test_an_unfinished_iteration_is_undone_by_what_the_replica_has(tmp_path):
    states = states_of("")
    loop, checkpointer = trained(tmp_path, "", 5, saved=(2,))
    with checkpointer:
        loop.model(torch.randn(5, 7), False).sum().backward()
        loop.optimizers[0].step()
        with torch.no_grad():
            loop.model.scale.add_(1)
        with pytest.raises(NoCommit):
            checkpointer.rollback(3)  # of which there is no base
        assert checkpointer.rollback() == 5
        assert same(loop.state(), states[5])
        go_on(loop, checkpointer, 9)
        assert same(loop.state(), states[9])
    assert not events(tmp_path, "drift")


def test_a_copy_in_memory_beside_a_replica_is_refused(tmp_path):
    _, checkpointer = trained(tmp_path, "", 1, saved=())
    with checkpointer, pytest.raises(BadInput, match="base_every"):
        checkpointer.guard(copy_every=3)
