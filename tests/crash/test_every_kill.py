"""A loop whose steps are kept by bases alone, or as ``every="auto"`` changes between them and records, is killed at
each failpoint of a commit, and comes back from what a power cut could leave: from a step that is not before the last
acknowledged one, to the very bits of a loop that was never killed."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from checkpoint.loops import make
from combined import one_in
from crash.test_survive_images import ROOT, STEPS, check, small, states  # noqa: F401
from holdfast import failpoints
from holdfast.checkpointer import Checkpointer
from support.simdisk import SimDisk
from support.switching import switch_often
from survive_run import FEATURE, OPTIMIZER

LONG = 60
FAILPOINTS = [*failpoints.NAMES[:-1], "after_unit_staged"]


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    outcome = server.run(survive=True, root=tmp_path_factory.mktemp("undisturbed"), steps=LONG)
    assert outcome.finished, outcome.error
    return outcome


@pytest.mark.crash
@pytest.mark.parametrize("every, failpoint, arrival", one_in(4, [3, "auto"], FAILPOINTS, [2, 3, 4, 5]))
def test_killed_at_a_failpoint_without_records(server, undisturbed, tmp_path, every, failpoint, arrival):
    options = {"survive": True, "root": tmp_path, "steps": LONG, "every": every, "switching": every == "auto"}
    options["patient"] = True
    outcome = server.run(failpoint=f"{failpoint}:{arrival}", **options)
    assert outcome.killed, outcome
    last = server.run(**options)
    assert last.finished, last.error
    assert last.resumed >= outcome.durable
    assert last.losses == undisturbed.losses[len(undisturbed.losses) - len(last.losses) :]
    assert last.digest == undisturbed.digest


def process(disk, steps, every):
    """One process: resume, train to ``steps``; every step that it is told of is marked on the disk."""
    loop = make(OPTIMIZER, FEATURE)
    with Checkpointer(
        ROOT, model=loop.model, optimizer=loop.optimizers, every=every, disk=disk
    ) as checkpointer:
        for i in range(checkpointer.resume(), steps):
            loop.iteration(i, checkpointer.step)
            disk.ack(checkpointer.durable_step)
    disk.ack(checkpointer.durable_step)
    disk.end_process()


@pytest.mark.crash
@pytest.mark.parametrize("every", [2, "auto"])
def test_every_image_of_a_run_without_records_recovers(states, queue, monkeypatch, every):  # noqa: F811
    switch_often(monkeypatch.setattr)
    disk, acknowledged = SimDisk(), set()
    process(disk, 5, every)
    process(disk, STEPS, every)
    for image in islice(disk.images(random.Random(0), samples=1), 0, None, 2):
        check(image, states, queue)
        acknowledged.add(image.acked)
    assert len(acknowledged) >= 4
