"""A process killed, or a machine without power, at every failpoint of the commit protocol.

Recovery must find the newest acknowledged step or a newer one, every listed commit whole, and go on.
"""

from __future__ import annotations

import os

import pytest

from holdfast import failpoints
from holdfast.store.run_store import LocalStore
from powercut import power_cut_disk
from support.warm_python import TESTS, environment_of, run_python
from tiny_run import TinyRun, check_content

ONCE = "after_timeline_opened"  # a process opens one timeline
ARRIVALS = [name if name == ONCE else f"{name}:2" for name in failpoints.NAMES]


def run_child(root, steps, failpoint="", mount=""):
    """Run ``tiny_child`` and return (return code, resumed step, newest acknowledged step)."""
    words = [TESTS / "tiny_child.py", root, steps, *(["--cut", mount] if mount else [])]
    environment = environment_of(HOLDFAST_FAILPOINT=failpoint)
    child = run_python(*words, env=environment, modules=["tiny_run", "powercut"], timeout=60)
    lines = [line.split() for line in child.stdout.splitlines()]
    assert child.returncode in (0, -9), child.stderr
    resumed = max([int(step) for word, step in lines if word == "resumed"], default=0)
    acknowledged = max([int(step) for word, step in lines if word == "acknowledged"], default=0)
    return child.returncode, resumed, acknowledged


def check_recovery(root, acknowledged):
    """What is listed is whole, nothing acknowledged is lost, and the run goes on."""
    reader = LocalStore.read(root) if (root / "commits").exists() else None
    for ref in reader.commits() if reader else []:
        manifest = reader.load(ref)
        assert reader.verify(manifest) == []
        check_content(reader, manifest)
    if acknowledged:
        assert reader.newest_whole()[0].step >= acknowledged
    with TinyRun(root) as run:
        assert run.step >= acknowledged
        for _ in range(2):
            manifest = run.take_step()
        assert [ref.step for ref in run.store.commits()] == [manifest.step, manifest.step - 1]
        check_content(run.store, manifest)


@pytest.mark.parametrize("failpoint", ARRIVALS)
def test_killed_at_a_failpoint(tmp_path, failpoint):
    code, _, acknowledged = run_child(tmp_path / "run", 5, failpoint)
    assert code == -9, "the failpoint was never reached"
    check_recovery(tmp_path / "run", acknowledged)


@pytest.mark.slow
def test_killed_again_while_it_recovers(tmp_path):
    newest = 0
    for name in failpoints.NAMES:
        _, _, acknowledged = run_child(tmp_path / "run", 3, name)
        newest = max(newest, acknowledged)
    check_recovery(tmp_path / "run", newest)


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk(request, tmp_path_factory):
    with power_cut_disk(tmp_path_factory.mktemp("power"), request.param) as disk:
        yield disk


@pytest.mark.root
def test_the_power_cut_loses_what_was_not_synced(disk):
    """The fixture tells the truth: only synced bytes under a synced name are there afterwards."""
    (disk.folder / "unsynced").write_bytes(b"x" * 5000)
    with open(disk.folder / "synced", "wb") as file:
        file.write(b"x" * 5000)
        file.flush()
        os.fsync(file.fileno())
    disk.cut()
    unsynced = disk.folder / "unsynced"
    assert not unsynced.exists() or unsynced.stat().st_size == 0
    assert (disk.folder / "synced").read_bytes() == b"x" * 5000
    (disk.folder / "synced").unlink()


@pytest.mark.campaign(cover=True)
@pytest.mark.root
@pytest.mark.parametrize("failpoint", failpoints.NAMES)
def test_power_cut_at_a_failpoint(disk, failpoint):
    root = disk.folder / failpoint / "run"
    code, _, acknowledged = run_child(root, 5, failpoint, disk.mount)
    assert code == -9
    disk.reboot()
    check_recovery(root, acknowledged)


@pytest.mark.slow
@pytest.mark.root
def test_power_cut_right_after_each_acknowledgement(disk):
    root = disk.folder / "acknowledged" / "run"
    newest = 0
    for steps in (1, 1, 2, 3):
        _, resumed, acknowledged = run_child(root, steps, mount=disk.mount)
        assert resumed >= newest
        assert acknowledged == resumed + steps
        newest = acknowledged
        disk.reboot()
    check_recovery(root, newest)
