"""A loop with a checkpointer on a simulated disk, and recovery from whatever a power cut could leave of it.

In every image the newest step that can be recovered is not older than the newest one acknowledged, and it is the state
of its step, bit for bit. Each sync taken away must show in some image.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import islice

import pytest
import torch

from checkpoint.loops import make
from combined import CAMPAIGN
from holdfast.checkpoint.recovery.run_recovery import recover
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpoint.user_state import ScriptState
from holdfast.checkpointer import Checkpointer
from holdfast.distributed import Ranks
from holdfast.errors import HoldfastError
from holdfast.measure import drive_rates
from holdfast.state.live_state import LiveState
from holdfast.store.commit.retention import Keep
from holdfast.store.log import journal, striping
from holdfast.store.run_store import LocalStore
from support.simdisk import SimDisk
from support.switching import switch_often
from survive_run import FEATURE, OPTIMIZER, digest

ROOT, STEPS = "/sim", 9
SAMPLES = 5 if CAMPAIGN else 2
"""Random images of each moment: enough to show each sync that is left out."""


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_chunks, "UNIT_BYTES", 2500)
        patch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 1)
        patch.setattr(journal, "GROUPS_PER_SEGMENT", 2)
        yield


def merge(loop, i, feature):
    """A frozen parameter changes before some iterations, as where an adapter is merged."""
    if feature == "frozen" and i in (2, 6):
        with torch.no_grad():
            loop.model.first.bias.add_(i)


def process(disk, steps, states=None, saves=False, feature=FEATURE, values=None, waits=True, **how):
    """One process: resume, train to ``steps``; every step that it is told of is marked on the disk.

    With ``values``, a metric at some steps, the best base by it is kept.
    """
    loop, values = make(OPTIMIZER, feature), values or {}
    keep = Keep(1, best=1, metric="loss") if values else None
    with Checkpointer(
        ROOT, model=loop.model, optimizer=loop.optimizers, disk=disk, keep=keep, **({"base_every": 3} | how)
    ) as checkpointer:
        done = checkpointer.resume()
        for i in range(done, steps):
            merge(loop, i, feature)
            metrics = {"loss": values[i + 1]} if i + 1 in values else None
            loop.iteration(i, partial(checkpointer.step, metrics=metrics))
            if states is not None:
                states[i + 1] = digest(loop.state())
            if i % 2 and waits:
                checkpointer.wait()
            disk.ack(checkpointer.durable_step)
        if saves:
            checkpointer.save()
    disk.ack(checkpointer.durable_step)
    disk.end_process()


def record(feature=FEATURE):
    disk = SimDisk()
    process(disk, 5, feature=feature)
    process(disk, STEPS, feature=feature)
    return disk


def states_of(feature):
    """The digest of the state after every step, of a loop that nothing stops."""
    found = {}
    loop = make(OPTIMIZER, feature)
    found[0] = digest(loop.state())
    for i in range(STEPS):
        merge(loop, i, feature)
        loop.iteration(i, lambda: None)
        found[i + 1] = digest(loop.state())
    return found


@pytest.fixture(scope="module")
def states():
    return states_of(FEATURE)


@pytest.fixture(scope="module")
def recorded():
    return record()


def check(image, states, queue, feature=FEATURE):
    """The promise."""
    loop = make(OPTIMIZER, feature, seed=1)
    store = LocalStore(ROOT, disk=image.disk, queue=queue)
    if not store.disk.exists("commits") or not store.commits():
        assert image.acked is None
        return
    found = recover(
        store, LiveState(loop.model, loop.optimizers), ScriptState(loop.optimizers, {}), ranks=Ranks()
    )
    point = found.point
    assert image.acked is None or point.step >= image.acked
    assert digest(loop.state()) == states[point.step]


def check_breaks(disk, why, states, queue, feature=FEATURE):
    """Some image breaks the promise where the syncs for one reason are taken as if they had not been made."""
    start = next(place for place, operation in enumerate(disk.log) if operation.why == why)
    for image in disk.images(random.Random(0), samples=2, without=why, start=start):
        try:
            check(image, states, queue, feature)
        except (HoldfastError, AssertionError, FileNotFoundError):
            return
    pytest.fail(f"no image shows that the sync {why!r} is needed")


@pytest.mark.crash
def test_every_image_of_a_run_recovers(states, queue, recorded):
    total = with_steps = 0
    for image in islice(recorded.images(random.Random(0), samples=SAMPLES), 0, None, 1 if CAMPAIGN else 2):
        check(image, states, queue)
        total, with_steps = total + 1, with_steps + (image.acked is not None)
    print(f"{total} images, {with_steps} of them after the first acknowledgement")
    assert with_steps > 300


@pytest.mark.crash
@pytest.mark.filterwarnings("ignore:.*changed otherwise than by a step", "ignore:step . was not recorded")
def test_every_image_of_a_run_with_frozen_parameters_recovers(queue):
    """Most bases name the file of the one before; two write it again, since a parameter in it has changed."""
    states, with_steps = states_of("frozen"), 0
    disk = record("frozen")
    named = [name for name in disk.listdir("data") if "frozen-" in name]
    for image in disk.images(random.Random(0), samples=SAMPLES):
        check(image, states, queue, "frozen")
        with_steps += image.acked is not None
    assert with_steps > 300 and 1 < len(named) <= 4


@pytest.mark.crash
def test_every_image_of_a_run_has_the_best_base(states, queue):
    """A better one replaces it: in no image is the worse one gone and the better one not there."""
    values, disk = {2: 5.0, 4: 3.0, 6: 4.0, 8: 1.0}, SimDisk()
    process(disk, 5, values=values)
    process(disk, STEPS, values=values)
    for image in islice(disk.images(random.Random(0), samples=2), 0, None, 2):
        check(image, states, queue)
        measured = [values[step] for step in values if step <= (image.acked or 0)]
        store = LocalStore(ROOT, disk=image.disk, queue=queue)
        found = {m.metrics.get("loss"): m for m in map(store.load, store.commits())} if measured else {}
        best = min((value for value in found if value is not None), default=None)
        assert not measured or (best is not None and best <= min(measured))
        assert best is None or store.verify(found[best]) == []


@pytest.mark.crash
def test_every_image_of_many_resumes_recovers(states, queue):
    """Records of timelines that lead to nothing any more are removed on the way."""
    disk = SimDisk()
    for steps in range(1, STEPS + 1):
        process(disk, steps, saves=True)
    assert len(disk.listdir("timelines")) < STEPS
    for image in islice(disk.images(random.Random(0), samples=1), 0, None, 2 if CAMPAIGN else 4):
        check(image, states, queue)


@pytest.mark.crash
@pytest.mark.parametrize("every", [2, "auto"])
def test_every_image_of_a_run_without_records_recovers(states, queue, monkeypatch, every):
    """Bases alone, or as ``every="auto"`` changes between them and records."""
    switch_often(monkeypatch.setattr)
    disk, acknowledged = SimDisk(), set()
    for steps in (5, STEPS):
        process(disk, steps, every=every, base_every=None, waits=False)
    for image in islice(disk.images(random.Random(0), samples=1), 0, None, 2):
        check(image, states, queue)
        acknowledged.add(image.acked)
    assert len(acknowledged) >= 4


WHYS = ["makedirs", "unit directory", "unit data", "index", "index directory", "manifest", "manifest directory",
        "segment directory", "records"]  # fmt: skip
ELSEWHERE = ["retire", "timeline", "timeline directory"]
"""Shown in ``test_images.py``, by a run that goes back to a commit. Here records say what the timeline's own does."""


def test_the_list_of_syncs_is_complete(recorded):
    whys = {why for why in recorded.whys() if not why.startswith("reopen ")}
    assert sorted(whys) == sorted(WHYS + ELSEWHERE)


@pytest.mark.crash
@pytest.mark.parametrize("why", WHYS)
def test_without_any_one_sync_some_image_breaks_the_promise(states, queue, recorded, why):
    check_breaks(recorded, why, states, queue)


@pytest.mark.crash
@pytest.mark.filterwarnings("ignore:.*changed otherwise than by a step", "ignore:step . was not recorded")
def test_without_the_sync_of_a_frozen_file_some_image_breaks_the_promise(monkeypatch, queue):
    """Later bases name the file without another sync."""
    real = SimDisk.sync

    def sync(disk, target, *, why):
        frozen = {disk.open(f"data/{name}").inode for name in disk.listdir("data") if "frozen-" in name}
        is_frozen = why == "unit data" and target.inode in frozen
        real(disk, target, why="frozen data" if is_frozen else why)

    monkeypatch.setattr(SimDisk, "sync", sync)
    states, disk = states_of("frozen"), record("frozen")
    assert "frozen data" in disk.whys()
    check_breaks(disk, "frozen data", states, queue, "frozen")


# Several drives


@pytest.fixture
def striped(monkeypatch):
    """Records in stripes over drives as if of different disks, which nobody measures."""
    monkeypatch.setattr(striping, "STRIPE_BYTES", 4096)
    monkeypatch.setattr(drive_rates, "rate_of", lambda directory, limits: 1e9)
    monkeypatch.setattr(drive_rates, "device_of", hash)


def record_on_drives(folder, *lists):
    """A run over drives of these names, another list in each process."""
    disk = SimDisk()
    for number, names in enumerate(lists, 1):
        process(disk, number * STEPS // len(lists), drives=[folder / name for name in names])
    return disk


@pytest.mark.crash
@pytest.mark.parametrize("lists", [("ab", "ab"), ("", "a", "")], ids=["two", "there and back"])
def test_every_image_of_all_drives_recovers(striped, tmp_path, states, queue, lists):
    """Names and bytes on each drive may be there or not, whatever the others have."""
    with_steps, disk = 0, record_on_drives(tmp_path, *lists)
    for image in islice(disk.images(random.Random(0), samples=1), 0, None, 4 if CAMPAIGN else 16):
        check(image, states, queue)
        with_steps += image.acked is not None
    assert with_steps > 60


@pytest.mark.crash
@pytest.mark.parametrize("why", ["stripe directory", "stripes", "records"])
def test_without_any_one_sync_on_drives_some_image_breaks_the_promise(
    striped, tmp_path, monkeypatch, states, queue, why
):
    """The others show above, and that of links in ``store/test_drives.py``."""
    if why == "stripes":  # all records are on the drive
        rates = {"a": 1e15}
        monkeypatch.setattr(drive_rates, "rate_of", lambda directory, limits: rates.get(directory.name, 1e9))
    disk = record_on_drives(tmp_path, "a" if why == "stripes" else "ab")
    assert why in disk.whys()
    check_breaks(disk, why, states, queue)
