"""The disk runs full in the middle of training: a clear end, nothing acknowledged lost, and on with room made."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from crash_run import ON_SSD, STEPS
from fork_server import fill_disk
from powercut import power_cut_disk

pytestmark = pytest.mark.root
MIB = 1024**2


@contextmanager
def small_tmpfs(folder):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is refused here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def small_disk(kind, folder):
    """Yields where 16 MiB are mounted."""
    if kind == "tmpfs":
        with small_tmpfs(folder / "tmpfs") as mount:
            yield mount
    else:
        with power_cut_disk(folder, "ext4", 16 * MIB) as disk:
            yield disk.folder


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def mount(request, tmp_path_factory):
    yield from small_disk(request.param, tmp_path_factory.mktemp("full"))


@pytest.fixture
def order(mount, text):
    for old in mount.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    return {"root": mount / "run", "text": text, "direct": mount.name != "tmpfs"}


def check_full(outcome, directory):
    """The error says where, how much, how much is there, and the command line would return 3."""
    assert outcome.error.startswith(f"DiskFull: no space left in {directory}: "), outcome
    assert outcome.exit_code == 3
    assert (
        " bytes (" in outcome.error and " are needed for " in outcome.error and " are free" in outcome.error
    )
    assert "run again to resume" in outcome.error


def fill_and_resume(server, reference, order, mount, at, directory, **way):
    """The disk fills in the moment in which step ``at`` is acknowledged; nothing runs until there is room."""
    outcome = server.run(**order, steps=STEPS, fill=mount / "fill", at=at, **way)
    assert outcome.durable == at and not outcome.finished
    check_full(outcome, order["root"] / directory)
    fill_disk(str(mount / "fill"))
    reference.check_run(order["root"])
    again = server.run(**order, steps=STEPS, **way)
    assert not again.finished and again.exit_code in (2, 3)  # too small to begin with, or full on the way
    os.unlink(mount / "fill")
    outcome = server.run(**order, steps=STEPS, **way)
    assert outcome.finished and outcome.resumed == at and not outcome.warnings, outcome
    assert outcome.losses == reference.losses[at:]
    assert reference.check_run(order["root"])[0] == STEPS


@pytest.mark.campaign(cover=True)
@pytest.mark.crash
@pytest.mark.parametrize("way", [{}, ON_SSD, {"retain": 1}, {"commit_every": 2}], ids=str)
def test_full_in_the_middle_of_a_step(server, reference, order, mount, way):
    fill_and_resume(server, reference, order, mount, 4, "commits", **way)


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
def test_full_in_the_first_step_where_block_inputs_are_spilled(server, reference, order, mount):
    """Their room is taken when their size is known."""
    fill_and_resume(server, reference, order, mount, 0, "scratch", **ON_SSD)


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
def test_keeping_fewer_steps_makes_room(server, reference, order, mount):
    """As the error says."""
    assert server.run(**order, steps=4).finished
    used = sum(path.stat().st_blocks for path in order["root"].rglob("*"))
    outcome = server.run(**order, steps=STEPS, retain=1)
    assert outcome.finished and outcome.resumed == 4
    assert reference.check_run(order["root"]) == [STEPS]
    files = sorted(path.name for path in (order["root"] / "data").iterdir())
    assert len(files) == 2 * 5, files
    assert sum(path.stat().st_blocks for path in order["root"].rglob("*")) < 0.75 * used
