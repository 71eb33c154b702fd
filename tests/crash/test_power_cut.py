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
from functools import partial
from pathlib import Path

import pytest

from crash_run import ON_SSD, STEPS, kill_and_end
from fork_server import at_each
from holdfast import failpoints
from powercut import power_cut_disk
from support.warm_python import ONE_THREAD

pytestmark = pytest.mark.root


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


class Cutting:
    """Starts processes that may end in a power cut, after which the machine boots."""

    def __init__(self, server, disk):
        self.server, self.disk = server, disk

    def run(self, **order):
        outcome = self.server.run(cut=self.disk.mount, **order)
        if outcome.killed:
            self.disk.reboot()
        return outcome


@pytest.mark.campaign(cover=True)
@pytest.mark.crash
@pytest.mark.parametrize("way", [{}, {"retain": 1, "commit_every": 3, **ON_SSD}], ids=["mixed", "SSD"])
def test_power_cut_right_after_each_acknowledgement_of_one_run(server, reference, text, disk, folder, way):
    """Every process ends in a power cut, the first of them before it has taken a step."""
    steps = range(0, STEPS, way.get("commit_every", 1))
    kills = [partial(dict, at=step) for step in (*steps, STEPS)]
    kill_and_end(Cutting(server, disk), reference, folder, kills, lambda _: {"text": text, **way})


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(4))
def test_power_cut_at_every_failpoint_in_turn(server, reference, text, disk, folder, seed):
    """Each process resumes from what the power cut of the one before has left."""
    kill_and_end(
        Cutting(server, disk), reference, folder, at_each(failpoints.NAMES, seed), lambda _: {"text": text}
    )


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
