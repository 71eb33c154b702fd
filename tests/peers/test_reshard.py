"""The benchmark that compares with DeepSpeed runs, in its small form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reshard.py"


@pytest.mark.campaign
@pytest.mark.peers
@pytest.mark.timeout(600)
def test_conversion_and_resumption_are_compared_with_deepspeeds(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--small", "--folder", tmp_path, "--peers", sys.executable],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout.splitlines()[-1])["zero"]
    assert found["stage"] == 3 and len(found["seconds"]) == 11  # six commands, and the starts of five
    assert found["temporary_bytes"]["ds_to_universal"] > found["parameter_bytes"]
    ours = found["temporary_bytes"]["convert"], found["temporary_bytes"]["convert to a run"]
    assert max(ours) < 4096
    assert list(tmp_path.iterdir()) == [], "it left something behind"
