"""The power is cut while a loop with a checkpointer runs: at every failpoint, and right after an acknowledgement."""

from __future__ import annotations

import shutil

import pytest

from fork_server import ForkServer
from holdfast import failpoints
from powercut import power_cut_disk

pytestmark = [pytest.mark.root, pytest.mark.crash]

STEPS = 40
"""Enough for a third base, with which the first one's records go."""


@pytest.fixture(scope="module")
def server():
    with ForkServer() as server:
        yield server


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
ARRIVALS += [(name, 2) for name, _ in ARRIVALS if name not in RARE]


@pytest.mark.parametrize("failpoint, arrival", ARRIVALS)
def test_power_cut_at_every_failpoint(server, undisturbed, disk, root, failpoint, arrival):
    outcome = server.run(
        survive=True, root=root, steps=STEPS, base_every=3, groups_per_segment=1, cut=disk.mount,
        failpoint=f"{failpoint}:{arrival}",
    )  # fmt: skip
    check_goes_on(server, undisturbed, disk, root, outcome)
