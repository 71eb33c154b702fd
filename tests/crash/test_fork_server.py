"""The server of the crash tests tells a process that hangs from one that was killed or is slow."""

from __future__ import annotations

import pytest


def test_a_process_that_hangs_fails_the_test_with_the_stacks_of_its_threads(server, text, tmp_path):
    """The thread that publishes stays at a failpoint, and the one that trains waits for it."""
    order = {"root": tmp_path / "run", "text": text, "failpoint": "before_retire:2", "hangs": True}
    with pytest.raises(AssertionError, match="hung") as caught:
        server.run(**order, steps=10, retain=1)
    told = str(caught.value)
    for place in ("in hang", "in publish", "in take_steps"):
        assert place in told


def test_the_server_goes_on_after_a_process_that_hung(server, text, tmp_path):
    order = {"root": tmp_path / "run", "text": text, "steps": 2}
    with pytest.raises(AssertionError, match="hung"):
        server.run(**order, failpoint="after_timeline_opened", hangs=True)
    assert server.run(**order).finished
