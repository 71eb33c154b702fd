"""The benchmarks run, in their small form, and print a line of JSON with what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WITHOUT_SMALL = {"peers_suites", "times"}  # of the suites of others, which are not here, and of this one
SCRIPTS = sorted(
    path.stem
    for path in BENCHMARKS.glob("*.py")
    if "def main()" in path.read_text() and path.stem not in WITHOUT_SMALL
)


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_in_its_small_form(script, tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", "--small", "--folder", tmp_path],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == script and result["commit"]
    assert list(tmp_path.iterdir()) == [], "it left something behind"
