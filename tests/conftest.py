"""Every test computes on one thread: small operations on more of them are many times slower when cores are
shared, and some sums come out in another order."""

import os
import threading

import pytest
import torch

from buckets import emptied, served
from combined import CAMPAIGN, spread
from holdfast import failpoints
from killed import kill
from matrix.cells import told

torch.set_num_threads(1)

os.environ.setdefault(
    "HOLDFAST_MACHINE", "cpu-2-core"
)  # nothing is measured, and no profile kept, unless a test does


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


@pytest.fixture(scope="module")
def s3():
    """The address of an S3 server, one for each module that asks for it."""
    yield from served()


@pytest.fixture
def bucket(s3, monkeypatch):
    """A place in an empty bucket, which the environment says how to reach."""
    return emptied(s3, monkeypatch)


def pytest_collection_modifyitems(config, items):
    """Leave to ``make campaign`` tests that are marked so; of one marked ``campaign(keep=n)``, all but ``n`` cases."""
    if CAMPAIGN:
        return
    left, several = set(), {}
    for item in items:
        keeps = [marker.kwargs.get("keep", 0) for marker in item.iter_markers("campaign")]
        if 0 in keeps:
            left.add(item)
        elif keeps:
            several.setdefault((item.function, keeps[0]), []).append(item)
    for (_, keep), cases in several.items():
        left |= {*cases} - {*spread(keep, cases)}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_terminal_summary(terminalreporter):
    """The cells of the matrix that were tried, as docs/moves.md has them."""
    for line in told(terminalreporter.stats):
        terminalreporter.line(line)
