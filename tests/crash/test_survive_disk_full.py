"""The disk of a run runs full beside training: a clear end, nothing acknowledged lost, and on with room made."""

from __future__ import annotations

import os
import shutil

import pytest

from crash.test_disk_full import small_disk

pytestmark = [pytest.mark.root, pytest.mark.crash]

STEPS = 40


@pytest.fixture(scope="module", params=[{}, {"codec": "topk"}], ids=["exact", "topk"])
def kind(request):
    return {"survive": True, "steps": STEPS, **request.param}


@pytest.fixture(scope="module")
def undisturbed(server, kind, tmp_path_factory):
    outcome = server.run(root=tmp_path_factory.mktemp("undisturbed"), base_every=3, **kind)
    assert outcome.finished, outcome.error
    return outcome


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def mount(request, tmp_path_factory):
    yield from small_disk(request.param, tmp_path_factory.mktemp("full"))


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("base_every", [3, 1000])
@pytest.mark.parametrize("step", [0, 5, 17])
def test_a_disk_that_runs_full_is_named_and_the_run_goes_on_with_room(
    server, undisturbed, kind, mount, base_every, step
):
    """In a record, and in a base."""
    for old in mount.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    order = {**kind, "root": mount / "run", "base_every": base_every}
    outcome = server.run(**order, fill=mount / "fill", from_step=step)
    assert not outcome.finished and outcome.durable >= step
    assert outcome.error.startswith("DiskFull: no space left in "), outcome
    os.unlink(mount / "fill")
    exactness = {"exactness": "continuation"} if "codec" in kind else {}
    last = server.run(**order, **exactness)
    assert last.finished, last.error
    assert "codec" in kind or last.resumed >= outcome.durable
    assert last.losses == undisturbed.losses[last.resumed :] and last.digest == undisturbed.digest
