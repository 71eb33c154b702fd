"""Training on a simulated disk, and recovery from whatever a power cut could leave of it.

From every prefix of what the disk was told, images are made in which un-synced writes are lost or torn and
un-synced names kept or lost. In each, the newest whole step is not older than the newest one acknowledged,
and every listed commit is the state of its step, bit for bit. Scratch is left out of the account: nothing
reads what an earlier process left in it.
"""

from __future__ import annotations

import random

import pytest

from combined import CAMPAIGN, some_of
from crash_run import MIXED, ON_SSD, Reference, acknowledging, engine_of, take_steps, train
from holdfast import failpoints
from holdfast.errors import HoldfastError
from holdfast.io.queue import IOQueue
from holdfast.store.run_store import LocalStore
from killed import Killed, kill
from support.simdisk import SimDisk

BLOCKS, STEPS = 2, 8
ROOT = "/sim"


@pytest.fixture(scope="module")
def queue():
    queue = IOQueue(1)
    yield queue
    queue.close()


@pytest.fixture(scope="module")
def undisturbed(text):
    disk = SimDisk()
    losses = train(ROOT, text, STEPS, disk=disk, blocks=BLOCKS, retain=STEPS + 1)
    return Reference(LocalStore.read(ROOT, disk=disk), losses)


def process(disk, text, steps, **options):
    """One process: resume, train to ``steps``; every step it acknowledges is marked on the disk."""

    def acknowledge(runtime, step):
        disk.ack((runtime.store.timeline, step))

    with acknowledging(acknowledge):
        take_steps(engine_of(ROOT, text, disk=disk, blocks=BLOCKS, io_threads=2, **options), steps)


def go_back(disk, step):
    """A process that wants an earlier step, and no longer the later ones; it takes none itself."""
    with LocalStore.open(ROOT, disk=disk) as store:
        disk.ack((1, step))
        timeline = store.begin(store.at(step))
        disk.ack((timeline, step))


@pytest.fixture(scope="module")
def recorded(text) -> SimDisk:
    """Two processes, a return to an earlier step, and two that are killed in the middle of a commit."""
    disk = SimDisk()
    process(disk, text, 2)
    process(disk, text, 4, **ON_SSD)
    go_back(disk, 3)
    process(disk, text, 5, schedule="horizontal")
    for failpoint in ("after_manifest_rename", "after_retire_unlink"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(failpoints, "armed", failpoint)
            patch.setattr(failpoints, "_arrivals", {})
            patch.setattr(failpoints, "action", kill)
            process(disk, text, STEPS)
    process(disk, text, STEPS)
    return without_scratch(disk)


def without_scratch(disk):
    scratch = {op.inode for op in disk.log if op.verb == "create" and op.place == "scratch"}
    disk.log = [op for op in disk.log if op.place != "scratch" and op.place not in scratch]
    return disk


def check(image, reference, queue):
    """The promise."""
    timeline, step = image.acked or (0, -1)
    if not image.disk.exists("commits"):
        assert not timeline
        return
    reader = LocalStore.read(ROOT, disk=image.disk, queue=queue)
    reference.check_all(reader)
    assert max(reader.timelines()[0], default=0) >= timeline
    if step >= 0:
        assert reader.newest_whole()[0].step >= step


@pytest.mark.crash
def test_every_image_of_a_run_recovers(undisturbed, queue, recorded):
    total = with_commits = 0
    for image in recorded.images(random.Random(0), samples=30 if CAMPAIGN else 12):
        check(image, undisturbed, queue)
        total, with_commits = total + 1, with_commits + (image.acked is not None)
    print(f"{total} images, {with_commits} of them after the first acknowledgement")
    assert with_commits > (400 if CAMPAIGN else 250)


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize(
    "way", some_of(2, [{"retain": 1, "commit_every": 2, **MIXED}, {"commit_every": 3}, {"retain": 1}])
)
def test_every_image_of_a_run_that_keeps_less_recovers(text, undisturbed, queue, way):
    disk = SimDisk()
    process(disk, text, 5, **way)
    process(disk, text, STEPS, **way)
    for image in without_scratch(disk).images(random.Random(0), samples=10):
        check(image, undisturbed, queue)


@pytest.mark.crash
def test_training_goes_on_from_an_image(text, undisturbed, queue, recorded):
    """Recovery is itself a run: the end is the same, and keeps the promise again."""
    images = list(recorded.images(random.Random(1), samples=2))
    for image in random.Random(2).sample(images, 40 if CAMPAIGN else 10):
        again = image.disk
        losses = train(ROOT, text, STEPS, disk=again, blocks=BLOCKS)
        assert losses == undisturbed.losses[STEPS - len(losses) :]
        assert undisturbed.check_all(LocalStore.read(ROOT, disk=again, queue=queue))[0] == STEPS


WHYS = ["makedirs", "reopen commits directory", "timeline", "timeline directory", "unit directory", "unit data",
        "index", "index directory", "manifest", "manifest directory", "retire"]  # fmt: skip


@pytest.mark.slow
def test_the_list_of_syncs_is_complete(recorded):
    """What opening a run syncs besides is for runs that were copied: ``tests/store/test_recovery.py``."""
    whys = set(recorded.whys())
    assert set(WHYS) <= whys
    assert all(why.startswith("reopen ") for why in whys - set(WHYS))


@pytest.mark.crash
@pytest.mark.parametrize("why", WHYS)
def test_without_any_one_sync_some_image_breaks_the_promise(undisturbed, queue, recorded, why):
    start = next(place for place, operation in enumerate(recorded.log) if operation.why == why)
    for image in recorded.images(random.Random(0), samples=4, without=why, start=start):
        try:
            check(image, undisturbed, queue)
        except (HoldfastError, AssertionError, FileNotFoundError):
            return
    pytest.fail(f"no image shows that the sync {why!r} is needed")
