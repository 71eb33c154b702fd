"""The power is cut while a loop with a checkpointer runs: at every failpoint, and right after an acknowledgement. Also
while its run is compacted or pruned, and beside a replica, which the power takes as well."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import partial

import pytest

from combined import CAMPAIGN, some_of
from crash.test_replica_kill import wait_for_end
from crash.test_survive_kill import COMPACTED, EVERY, PRUNED, shortened  # noqa: F401 (a fixture)
from fork_server import at_each
from holdfast import failpoints
from holdfast.checkpoint.replica import shared_memory
from powercut import power_cut_disk
from survive_run import kill_and_end

pytestmark = [pytest.mark.root, pytest.mark.crash]

STEPS = 160


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk(request, tmp_path_factory):
    with power_cut_disk(tmp_path_factory.mktemp("power"), request.param) as disk:
        yield disk


@pytest.fixture
def folder(disk):
    """A directory on the disk; those of the test before are gone."""
    for old in disk.folder.iterdir():
        shutil.rmtree(old)
    return disk.folder


ACKNOWLEDGED = [lambda step=step: {"from_step": step} for step in (0, 1, 4, 9, 16)]
"""Or after the next step there is: several become durable at once."""


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("seed", range(6))
def test_power_cuts_in_turn(server, undisturbed_loop, disk, folder, seed):
    """Right after acknowledgements, and at every failpoint; on xfs at a third of those places."""
    kills = [*ACKNOWLEDGED, *at_each(EVERY, seed)]
    kills = kills if CAMPAIGN or "ext4" in disk.image.name else kills[::3]

    def run(root, **kill):
        order = {"steps": STEPS, "base_every": 3, "groups_per_segment": 1, "cut": disk.mount}
        outcome = server.run(survive=True, root=root, **order, **kill)
        assert outcome.durable >= kill.get("from_step", -1)
        if outcome.killed:
            disk.reboot()
        return outcome

    kill_and_end(run, undisturbed_loop(steps=STEPS), folder, kills)


@pytest.mark.parametrize("disk", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)], indirect=True)
@pytest.mark.parametrize(
    "verb, failpoint",
    some_of(2, [*(("compact", name) for name in COMPACTED), *(("prune", name) for name in PRUNED)]),
)
def test_power_cut_while_it_is_made_shorter(shortened, disk, folder, verb, failpoint):  # noqa: F811
    root = shutil.copytree(shortened[verb].root, folder / "run")
    subprocess.run(["sync", "-f", root], check=True)
    outcome = shortened[verb].run(root, failpoint=failpoint, cut=disk.mount)
    assert outcome.killed, outcome
    disk.reboot()
    shortened[verb].check(root)


# beside a replica

OF_TRAINERS = ("after_gradient_copied", "before_step_handed", "after_step_handed")

OF_STEPS = [*OF_TRAINERS, "before_replica_update", "in_replay", "after_replica_update"]
BESIDE_A_REPLICA = [
    partial(dict, failpoint="before_replica_kept", dies_at=25),
    partial(dict, failpoint="after_replica_kept", dies_at=50),
    *(
        partial(dict, failpoint=place)
        for place in some_of(
            2,
            [
                *(f"{name}:2" for name in failpoints.NAMES if name != "after_timeline_opened"),
                *(f"{name}:9" for name in OF_STEPS),
            ],
        )
    ),
]
"""Of the second base: each is one unit, and the trainer, which hands over a state in the same format, arrives once."""


@pytest.mark.parametrize("disk", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)], indirect=True)
def test_power_cuts_in_turn_beside_a_replica(server, undisturbed_loop, disk, folder):
    """The disk has its step, and what was in memory is gone with both processes."""

    def run(root, **kill):
        order = {"base_every": 5, "unit_bytes": 1 << 20, "linger_seconds": 60.0, "steps": STEPS}
        outcome = server.run(replica=True, root=root, cut=disk.mount, **order, **kill)
        outcome.acknowledged = [outcome.durable_step]
        if not outcome.finished:
            assert outcome.replica and (outcome.killed or "ReplicaDied" in outcome.error), outcome
            outcome.code = -signal.SIGKILL  # or its replica was killed
            if kill["failpoint"].startswith(OF_TRAINERS):  # which the replica outlives, but not the machine
                os.kill(outcome.replica, signal.SIGKILL)
            wait_for_end(outcome.replica)
            shared_memory.remove(shared_memory.place_of(root, shared_memory.MEMORY))
            disk.reboot()
        assert not shared_memory.place_of(root, shared_memory.MEMORY).exists()
        return outcome

    kill_and_end(run, undisturbed_loop(steps=STEPS), folder, BESIDE_A_REPLICA)
