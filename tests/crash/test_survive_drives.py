"""A loop with a checkpointer over several drives: what a power cut leaves on all of them, and kills in turn while the
list of drives changes. What was acknowledged comes back, bit for bit."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from checkpoint.loops import make
from combined import some_of
from crash.test_survive_images import ROOT, STEPS, check, states_of
from fork_server import ForkServer
from holdfast import failpoints
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpointer import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.measure import drive_rates
from holdfast.store.log import journal, striping
from support.simdisk import SimDisk
from survive_run import FEATURE, OPTIMIZER

pytestmark = pytest.mark.crash


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 2500)
    monkeypatch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 1)
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", 2)
    monkeypatch.setattr(striping, "STRIPE_BYTES", 4096)
    monkeypatch.setattr(drive_rates, "rate_of", lambda directory, limits: 1e9)
    monkeypatch.setattr(drive_rates, "device_of", hash)


@pytest.fixture(scope="module")
def states():
    return states_of(FEATURE)


def process(disk, steps, used):
    """One process: resume, train to ``steps``; every step that it is told of is marked on the disk."""
    loop = make(OPTIMIZER, FEATURE)
    with Checkpointer(
        ROOT, model=loop.model, optimizer=loop.optimizers, base_every=3, drives=used, disk=disk
    ) as checkpointer:
        for i in range(checkpointer.resume(), steps):
            loop.iteration(i, checkpointer.step)
            if i % 2:
                checkpointer.wait()
            disk.ack(checkpointer.durable_step)
    disk.ack(checkpointer.durable_step)
    disk.end_process()


def record(folder: Path, *lists: str) -> SimDisk:
    """A run over drives of these names, another list in each process."""
    disk = SimDisk()
    for number, names in enumerate(lists, 1):
        process(disk, number * STEPS // len(lists), [folder / name for name in names])
    return disk


@pytest.mark.parametrize("lists", [("ab", "ab"), ("", "a", "")], ids=["two", "there and back"])
def test_every_image_of_all_drives_recovers(small, tmp_path, states, queue, lists):
    """Names and bytes on each drive may be there or not, whatever the others have."""
    with_steps, disk = 0, record(tmp_path, *lists)
    for image in islice(disk.images(random.Random(0), samples=1), 0, None, 8):
        check(image, states, queue)
        with_steps += image.acked is not None
    assert with_steps > 60


@pytest.mark.parametrize("why", ["stripe directory", "stripes", "records"])
def test_without_any_one_sync_some_image_breaks_the_promise(small, tmp_path, monkeypatch, states, queue, why):
    """The others show in ``test_survive_images.py``, and that of links in ``store/test_drives.py``."""
    if why == "stripes":  # all records are on the drive
        rates = {"a": 1e15}
        monkeypatch.setattr(drive_rates, "rate_of", lambda directory, limits: rates.get(directory.name, 1e9))
    disk = record(tmp_path, "a" if why == "stripes" else "ab")
    assert why in disk.whys()
    for image in disk.images(random.Random(0), samples=2, without=why):
        try:
            check(image, states, queue)
        except (HoldfastError, AssertionError, FileNotFoundError):
            return
    pytest.fail(f"no image shows that the sync {why!r} is needed")


@pytest.fixture(scope="module")
def server():
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    outcome = server.run(survive=True, root=tmp_path_factory.mktemp("undisturbed"), steps=40, base_every=1000)
    assert outcome.finished, outcome.error
    return outcome


EVERY = [*failpoints.NAMES, *failpoints.RECORDING, *failpoints.JOURNAL]


@pytest.mark.parametrize("seed", some_of(2, range(8)))
def test_killed_in_turn_at_every_failpoint_while_drives_change(server, undisturbed, tmp_path, seed):
    """Each process has another list than the one before, and is killed at the next failpoint."""
    chance, newest = random.Random(seed), -1
    order = {"survive": True, "root": tmp_path / "run", "base_every": 3, "steps": 40}
    lists = [[tmp_path / name for name in names] for names in ("", "a", "ab", "b", "ba")]
    for failpoint in chance.sample(EVERY, len(EVERY)):
        arrival = 1 if failpoint == "after_timeline_opened" else chance.randint(1, 2)
        outcome = server.run(**order, drives=chance.choice(lists), failpoint=f"{failpoint}:{arrival}")
        assert not outcome.error, outcome
        assert outcome.resumed is None or outcome.resumed >= newest
        newest = max(newest, outcome.durable)
        if outcome.finished:
            break
    last = server.run(**order, drives=chance.choice(lists))
    assert last.finished and last.resumed >= newest, last.error
    assert last.losses == undisturbed.losses[last.resumed :] and last.digest == undisturbed.digest
