"""Every test computes on one thread: small operations on more of them are many times slower when cores are
shared, and some sums come out in another order."""

import threading

import pytest
import torch

from holdfast import failpoints
from killed import kill

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Every engine and queue of a test is closed by its end."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("holdfast") and t not in before]
    assert not left, f"threads left: {left}"


@pytest.fixture
def kill_at(monkeypatch):
    """Arms a failpoint that raises ``Killed``."""

    def arm(name):
        monkeypatch.setattr(failpoints, "armed", name)
        monkeypatch.setattr(failpoints, "_arrivals", {})

    monkeypatch.setattr(failpoints, "action", kill)
    return arm
