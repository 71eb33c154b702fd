"""An offloaded ``Trainer`` script is killed, and the very same script, started again, goes on to the same end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

TESTS = Path(__file__).parent.parent


def run(output, kill_at=None):
    """The steps that the script said, and the digest at its end; killed as soon as it says ``kill_at``, two steps after
    which it waits for that."""
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    waits_after = [] if kill_at is None else [str(kill_at + 2)]
    process = subprocess.Popen(
        [sys.executable, TESTS / "offloaded_script.py", output, *waits_after],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    steps, digest = [], None
    with process:
        assert process.stdout
        for line in process.stdout:
            said = json.loads(line) if line.startswith('{"') else {}
            steps += [said["step"]] if "step" in said else []
            digest = said.get("digest", digest)
            if kill_at is not None and kill_at in steps:
                process.kill()
    assert process.returncode == (0 if kill_at is None else -9)
    return steps, digest


@pytest.mark.crash
def test_a_killed_script_goes_on(tmp_path):
    steps, whole = run(tmp_path / "undisturbed")
    assert steps == list(range(1, 9))
    killed, _ = run(tmp_path / "killed", 5)
    steps, digest = run(tmp_path / "killed")
    assert killed[0] == 1 and 4 <= steps[0] <= killed[-1]  # step 5 may have been under way
    assert digest == whole
