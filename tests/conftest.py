"""Every test computes on one thread: small operations on more of them are many times slower when cores are
shared, and some sums come out in another order."""

import threading

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Every engine and queue of a test is closed by its end."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("holdfast") and t not in before]
    assert not left, f"threads left: {left}"
