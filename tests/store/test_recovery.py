"""Recovery from whatever a power cut leaves: every prefix of a run's operations, un-synced ones lost or torn.

The promise, checked on each image: the newest whole step is not older than the newest acknowledged one and
not of a line that was left; and every commit that the directory lists is whole, with its own bytes.
"""

from __future__ import annotations

import random

import pytest

from holdfast.errors import HoldfastError
from holdfast.io.queue import IOQueue
from holdfast.store.run_store import DIRECTORIES, LocalStore
from killed import Killed
from support.powerloss import ABOVE, Operation
from support.simdisk import SimDisk
from tiny_run import TinyRun, check_content

TENSORS = {
    "block_0": [("a/param", "F32", (3, 5)), ("a/exp_avg", "F32", (3, 5))],
    "block_1": [("b/param", "BF16", (701,))],
}
FROZEN = {"frozen": [("c/param", "U8", (11,))]}


def steps(disk, count, fork=None):
    """One process: resume, take ``count`` steps, acknowledging each."""
    if fork is not None:
        disk.ack((1, fork))  # whoever asks for an earlier step no longer wants the later ones
    with TinyRun("/sim", disk=disk, tensors=TENSORS, frozen=FROZEN, threads=1, fork=fork) as run:
        disk.ack((run.timeline, run.step))
        for _ in range(count):
            run.take_step()
            disk.ack((run.timeline, run.step))


def record(kill_at) -> SimDisk:
    """A run that stops, goes back a step, and is killed with a commit and a retirement half done."""
    disk = SimDisk()
    steps(disk, 4)
    steps(disk, 2, fork=3)
    for failpoint in ("after_manifest_rename", "after_retire_unlink"):
        kill_at(failpoint)
        with pytest.raises(Killed):
            steps(disk, 1)
        kill_at("")
    steps(disk, 2)
    return disk


def check(image, queue) -> None:
    """The promise."""
    reader = LocalStore.read("/sim", disk=image.disk, queue=queue) if image.disk.exists("commits") else None
    for ref in reader.commits() if reader else []:
        manifest = reader.load(ref)
        assert reader.verify(manifest) == []
        check_content(reader, manifest)
    timeline, step = image.acked or (0, 0)
    if timeline:
        assert reader is not None and max(reader.timelines()[0], default=0) >= timeline
    if step:
        assert reader.newest_whole()[0].step >= step


@pytest.mark.slow
def test_every_image_of_a_run_recovers(kill_at):
    disk, queue = record(kill_at), IOQueue(1)
    count = 0
    for image in disk.images(random.Random(0), samples=4):
        check(image, queue)
        count += 1
    queue.close()
    assert count > 400


@pytest.mark.slow
def test_a_run_goes_on_from_an_image(kill_at):
    """Recovery is itself a run: resume from images, take steps, and the result keeps the promise again."""
    disk, queue = record(kill_at), IOQueue(1)
    images = list(disk.images(random.Random(1), samples=2))
    for image in random.Random(2).sample(images, 40):
        again = image.disk
        with TinyRun("/sim", disk=again, tensors=TENSORS, frozen=FROZEN, threads=1) as run:
            for _ in range(3):
                manifest = run.take_step()
            assert [ref.step for ref in run.store.commits()] == [manifest.step, manifest.step - 1]
            check_content(run.store, manifest)
            assert run.store.verify(manifest) == []
    queue.close()


REOPEN = [
    f"reopen {what}{directory}"
    for what in ("data", "index", "timelines", "commits")
    for directory in ("", " directory")
]
WHYS = ["makedirs", "timeline", "timeline directory", "unit directory", "unit data",
        "index", "index directory", "manifest", "manifest directory", "retire", "reopen commits directory"]  # fmt: skip


def test_the_list_of_syncs_is_complete(kill_at):
    assert set(record(kill_at).whys()) == {*WHYS, *REOPEN}


@pytest.mark.parametrize("why", WHYS)
def test_without_any_one_sync_some_image_breaks_the_promise(kill_at, why):
    disk, queue = record(kill_at), IOQueue(1)
    try:
        for image in disk.images(random.Random(0), samples=4, without=why):
            try:
                check(image, queue)
            except (HoldfastError, AssertionError, FileNotFoundError):
                return
    finally:
        queue.close()
    pytest.fail(f"no image shows that the sync {why!r} is needed")


def copied(disk) -> SimDisk:
    """A copy of the run on ``disk``, as ``cp -r`` makes it: complete, and nothing of it synced."""
    copy = SimDisk()
    for directory in ("", *DIRECTORIES):
        parent = ABOVE if directory == "" else ""
        copy._do(Operation("mkdir", parent, directory))
        copy._state.directories.setdefault(directory, {})
    for directory in DIRECTORIES:
        for name in disk.listdir(directory):
            copy.write_bytes(f"{directory}/{name}", disk.read_bytes(f"{directory}/{name}"))
    return copy


def resumed_copy(kill_at) -> tuple[SimDisk, int]:
    """A copied run that was opened, and what was found in it acknowledged: the disk, and where that began."""
    disk = copied(record(kill_at))
    with LocalStore.open("/sim", disk=disk) as store:
        newest = store.newest_whole()[0]
        start = len(disk.log)
        disk.ack((newest.timeline, newest.step))
    return disk, start


def test_a_copy_that_was_opened_is_durable(kill_at):
    (disk, start), queue = resumed_copy(kill_at), IOQueue(1)
    for image in disk.images(random.Random(0), start=start):
        check(image, queue)
    queue.close()


@pytest.mark.parametrize("why", ["makedirs", *REOPEN])
def test_without_any_one_sync_at_its_opening_a_copy_is_not_durable(kill_at, why):
    (disk, start), queue = resumed_copy(kill_at), IOQueue(1)
    broken = 0
    for image in disk.images(random.Random(0), start=start, without=why):
        try:
            check(image, queue)
        except (HoldfastError, AssertionError, FileNotFoundError):
            broken += 1
    queue.close()
    assert broken


@pytest.mark.parametrize(
    "method, why, nth",
    [("sync_dir", "unit directory", 1), ("sync_dir", "unit directory", 3), ("allocate", None, 2),
     ("allocate", None, 7), ("sync_dir", "index directory", 1), ("sync_dir", "timeline directory", 1)],
)  # fmt: skip
def test_what_a_process_killed_before_a_sync_had_made_is_durable_when_the_next_one_acknowledges(
    monkeypatch, method, why, nth
):
    disk, queue, arrivals = SimDisk(), IOQueue(1), 0
    original = getattr(SimDisk, method)

    def kill(self, *args, **options):
        nonlocal arrivals
        arrivals += why in (None, options.get("why"))
        if arrivals == nth:
            raise Killed
        return original(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SimDisk, method, kill)
        with pytest.raises(Killed):
            steps(disk, 2)
    disk.end_process()
    start = len(disk.log)
    with TinyRun("/sim", disk=disk, tensors=TENSORS, frozen=FROZEN, threads=1) as run:
        for _ in range(2):
            run.take_step()
            disk.ack((run.timeline, run.step))
    for image in disk.images(random.Random(0), start=start):
        check(image, queue)
    queue.close()
