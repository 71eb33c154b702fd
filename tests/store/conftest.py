"""A small run at store level: units of a few pages whose bytes are a pure function of the step."""

from __future__ import annotations

import pytest

from holdfast.io.queue import IOQueue
from tiny_run import TinyRun


@pytest.fixture(scope="module")
def queue():
    queue = IOQueue(2)
    yield queue
    queue.close()


@pytest.fixture
def run(tmp_path):
    with TinyRun(tmp_path / "run") as tiny:
        yield tiny
