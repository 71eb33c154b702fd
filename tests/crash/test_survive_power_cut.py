"""The power is cut while a loop with a checkpointer runs: at every failpoint, and right after an acknowledgement. Also
while its run is compacted or pruned, and beside a replica, which the power takes as well."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from combined import some_of
from crash.test_replica_kill import wait_for_end
from crash.test_survive_kill import COMPACTED, PRUNED, finished, recoverable
from holdfast import failpoints
from holdfast.checkpoint.replica import shared_memory
from holdfast.store.run_store import LocalStore
from powercut import power_cut_disk

pytestmark = [pytest.mark.root, pytest.mark.crash]

STEPS = 40
"""Enough for a third base, with which the first one's records go."""


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    outcome = server.run(
        survive=True, root=tmp_path_factory.mktemp("undisturbed"), steps=STEPS, base_every=1000
    )
    assert outcome.finished, outcome.error
    return outcome


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk(request, tmp_path_factory):
    with power_cut_disk(tmp_path_factory.mktemp("power"), request.param) as disk:
        yield disk


@pytest.fixture
def root(disk):
    """A run directory on the disk; the one of the test before is gone."""
    for old in disk.folder.iterdir():
        shutil.rmtree(old)
    return disk.folder / "run"


def check_goes_on(server, undisturbed, disk, root, outcome):
    assert outcome.killed, outcome
    disk.reboot()
    last = server.run(survive=True, root=root, steps=STEPS, base_every=3)
    assert last.finished, last.error
    assert last.resumed >= outcome.durable
    assert last.losses == undisturbed.losses[last.resumed :]
    assert last.digest == undisturbed.digest


@pytest.mark.parametrize("step", [0, 1, 4, 9, 16])
def test_power_cut_right_after_an_acknowledgement(server, undisturbed, disk, root, step):
    """Or after the next one there is: several steps become durable at once."""
    outcome = server.run(survive=True, root=root, steps=STEPS, base_every=3, cut=disk.mount, from_step=step)
    assert outcome.durable >= step
    check_goes_on(server, undisturbed, disk, root, outcome)


RARE = ("after_timeline_opened", "before_retire", "after_retire_unlink", "after_retire_sync")
ARRIVALS = [(name, 1) for name in [*failpoints.NAMES, *failpoints.JOURNAL]]
ARRIVALS += some_of(6, [(name, 2) for name, _ in ARRIVALS if name not in RARE])
ARRIVALS += [(name, 9) for name in failpoints.RECORDING]


@pytest.mark.parametrize("disk", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)], indirect=True)
@pytest.mark.parametrize("failpoint, arrival", ARRIVALS)
def test_power_cut_at_every_failpoint(server, undisturbed, disk, root, failpoint, arrival):
    outcome = server.run(
        survive=True, root=root, steps=STEPS, base_every=3, groups_per_segment=1, cut=disk.mount,
        failpoint=f"{failpoint}:{arrival}",
    )  # fmt: skip
    check_goes_on(server, undisturbed, disk, root, outcome)


def end_the_run(server, undisturbed, root):
    """Train a run that has come to its end once more, and compare what it holds."""
    last = server.run(survive=True, root=root, steps=STEPS, base_every=10)
    assert last.finished and last.resumed == STEPS and last.digest == undisturbed.digest, last


@pytest.mark.parametrize("disk", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)], indirect=True)
@pytest.mark.parametrize("failpoint", some_of(2, COMPACTED))
def test_power_cut_while_it_is_compacted(server, undisturbed, disk, root, failpoint):
    """What there was before a step that is compacted to may be gone, and nothing else."""
    before = recoverable(finished(server, root, 1))
    with LocalStore.read(root) as reader:
        newest = reader.line()[0].step
    to = max(before) - 1
    outcome = server.run(verb="compact", root=root, to=to, failpoint=failpoint, cut=disk.mount)
    assert outcome.killed, outcome
    disk.reboot()
    assert before - recoverable(root) <= set(range(newest, to))
    again = server.run(verb="compact", root=root, to=to)
    assert again.finished or f"step {to} is a base already" in again.error, again.error
    assert to in recoverable(root)
    end_the_run(server, undisturbed, root)


@pytest.mark.parametrize("disk", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)], indirect=True)
@pytest.mark.parametrize("failpoint", PRUNED)
def test_power_cut_while_it_is_pruned(server, undisturbed, disk, root, failpoint):
    before = recoverable(finished(server, root, 9))
    with LocalStore.read(root) as reader:
        kept = [ref.step for ref in reader.line()[:2]]
    outcome = server.run(verb="prune", root=root, keep=[2], failpoint=failpoint, cut=disk.mount)
    assert outcome.killed, outcome
    disk.reboot()
    should = set(range(min(kept), max(before) + 1))
    assert should <= recoverable(root)
    again = server.run(verb="prune", root=root, keep=[2])
    assert again.finished and should <= recoverable(root) <= before, again.error
    end_the_run(server, undisturbed, root)


REPLICAS = [f"{name}:2" for name in failpoints.NAMES if name != "after_timeline_opened"]
"""Of the second base: each is one unit, and the trainer, which hands over a state in the same format, arrives once."""

OF_TRAINERS = ("after_gradient_copied", "before_step_handed", "after_step_handed")

OF_STEPS = [*OF_TRAINERS, "before_replica_update", "in_replay", "after_replica_update"]


@pytest.mark.parametrize("disk", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)], indirect=True)
@pytest.mark.parametrize(
    "failpoint",
    some_of(
        2, [*REPLICAS, *(f"{name}:20" for name in OF_STEPS), "before_replica_kept", "after_replica_kept"]
    ),
)
def test_power_cut_beside_a_replica(server, undisturbed, disk, root, failpoint):
    """The disk has its step, and what was in memory is gone with both processes."""
    order = {"replica": True, "base_every": 5, "unit_bytes": 1 << 20, "linger_seconds": 60.0}
    dies_at = 25 if failpoint.endswith("replica_kept") else None
    outcome = server.run(
        root=root, steps=STEPS, dies_at=dies_at, failpoint=failpoint, cut=disk.mount, **order
    )
    assert outcome.replica and not outcome.finished, outcome
    if failpoint.startswith(OF_TRAINERS):  # which the replica outlives, but not the machine
        os.kill(outcome.replica, signal.SIGKILL)
    wait_for_end(outcome.replica)
    shared_memory.remove(shared_memory.place_of(root, shared_memory.MEMORY))
    disk.reboot()
    last = server.run(root=root, steps=STEPS, **order)
    assert last.finished, last.error
    assert last.resumed >= outcome.durable_step >= 0
    assert last.losses == undisturbed.losses[last.resumed :] and last.digest == undisturbed.digest
    assert not shared_memory.place_of(root, shared_memory.MEMORY).exists()
