"""The power cut in the middle of training, and right after a step was acknowledged, on real file systems.

The process that trains cuts the power itself, at a failpoint or in the moment in which ``durable_step`` has
moved; what the file system then has when it is mounted again is resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from combined import some_of
from crash_run import ON_SSD, STEPS
from holdfast import failpoints
from powercut import power_cut_disk
from support.warm_python import ONE_THREAD

pytestmark = pytest.mark.root


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


def resume(server, reference, order, disk, outcome):
    """Boot, see that nothing acknowledged is lost, and let the run end."""
    assert outcome.killed, outcome
    disk.reboot()
    steps = reference.check_run(order["root"])
    assert max(steps, default=-1) >= outcome.durable
    outcome = server.run(**order, steps=STEPS)
    assert outcome.finished and not outcome.warnings, outcome
    assert outcome.losses == reference.losses[outcome.resumed :]
    assert reference.check_run(order["root"])[0] == STEPS


@pytest.mark.slow
def test_power_cut_right_after_an_acknowledgement(server, reference, text, disk, root):
    order = {"root": root, "text": text}
    outcome = server.run(**order, steps=STEPS, cut=disk.mount, at=1)
    assert outcome.durable == 1
    resume(server, reference, order, disk, outcome)


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("way", [{}, {"retain": 1, "commit_every": 3, **ON_SSD}], ids=["mixed", "SSD"])
def test_power_cut_right_after_each_acknowledgement_of_one_run(server, reference, text, disk, root, way):
    """Every process ends in a power cut, the first of them before it has taken a step."""
    order, newest = {"root": root, "text": text, **way}, -1
    while newest < STEPS:
        target = 0 if newest < 0 else min(newest + way.get("commit_every", 1), STEPS)
        outcome = server.run(**order, steps=STEPS, cut=disk.mount, at=target)
        assert outcome.killed and outcome.durable == target
        assert newest < 0 or outcome.resumed == newest
        disk.reboot()
        newest = reference.check_run(root)[0]
        assert newest == target


ARRIVALS = [(name, 1) for name in failpoints.NAMES] + [
    (name, 3) for name in failpoints.NAMES if name != "after_timeline_opened"
] + [("before_data_sync", 13), ("after_data_sync", 18)]  # fmt: skip


@pytest.mark.crash
@pytest.mark.parametrize("disk", ["ext4", pytest.param("xfs", marks=pytest.mark.campaign)], indirect=True)
@pytest.mark.parametrize("failpoint, arrival", some_of(3, ARRIVALS))
def test_power_cut_at_every_failpoint(server, reference, text, disk, root, failpoint, arrival):
    order = {"root": root, "text": text}
    outcome = server.run(**order, steps=STEPS, cut=disk.mount, failpoint=f"{failpoint}:{arrival}")
    resume(server, reference, order, disk, outcome)


@pytest.mark.crash
def test_power_cut_at_each_failpoint_in_turn_of_one_run(server, reference, text, disk, root):
    """Each process resumes from what the power cut of the one before has left."""
    order, newest = {"root": root, "text": text}, -1
    for failpoint in failpoints.NAMES:
        outcome = server.run(**order, steps=STEPS, cut=disk.mount, failpoint=failpoint)
        assert outcome.killed and (outcome.resumed is None or outcome.resumed >= newest)
        newest = max(newest, outcome.durable)
        disk.reboot()
        assert max(reference.check_run(root), default=-1) >= newest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_table_of_what_a_power_cut_leaves(tmp_path):
    """The benchmark sees that a plain save is lost, that one by the rules is not, and that ours is not."""
    script = Path(__file__).parents[2] / "benchmarks/power_cut.py"
    command = [sys.executable, script, "--small", "--folder", tmp_path]
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in result:
        pytest.skip(result["skipped"])
    there = {(row["way"], row["moment"]): row["step 2"] for row in result["rows"]}
    assert there["torch.save, new name", "at once"] == 0
    for moment in ("at once", "after a sync of another file"):
        assert there["torch.save, fsync, rename, fsync by hand", moment] == 1
        assert there["holdfast: durable_step == 2", moment] == 1
