"""A killed run of a model with values beside its layers' return values goes on with the bits of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fork_server import ONE_THREAD, TESTS
from training import differing, stored

pytest.importorskip("transformers")

pytestmark = pytest.mark.crash

STEPS = 4


def process(name, run, failpoint=""):
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    return subprocess.run(
        [sys.executable, TESTS / "families_run.py", name, run, str(STEPS)],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": path, "HOLDFAST_FAILPOINT": failpoint},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Gemma3nForCausalLM"])
def test_killed_family_goes_on_bit_equal(tmp_path, name):
    whole = process(name, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed = process(name, tmp_path / "killed", "after_manifest_sync:3")  # the first is of the initial state
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = process(name, tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    losses, later = whole.stdout.split(), resumed.stdout.split()
    assert len(losses) == STEPS and later == losses[-len(later) :] and 0 < len(later) < STEPS
    assert differing(stored(tmp_path / "killed"), stored(tmp_path / "whole")) == []
