"""A standby whose state is on a device that is played: its thread replays there, and names the device as its own."""

from __future__ import annotations

import threading

import pytest

from checkpoint.test_following import followed, supervised  # noqa: F401
from played_device import HERE, Module, played  # noqa: F401

pytestmark = pytest.mark.usefixtures("played")


def test_state_follows_on_its_device(tmp_path, monkeypatch):
    threads, real = set(), Module.set_device
    monkeypatch.setattr(
        Module,
        "set_device",
        lambda module, device: (threads.add(threading.current_thread().name), real(module, device)),
    )
    first, standby = followed(tmp_path / "run", 3, device=HERE)
    assert standby.job.equals(first)
    first.steps(2)
    standby.until(lambda: standby.reached == 5)
    assert standby.job.equals(first)
    first.ckpt.close()
    job = standby.takes_over()
    assert job.ckpt.steps_done == 5 and job.equals(first)
    assert "holdfast-follower" in threads
    job.ckpt.close()
