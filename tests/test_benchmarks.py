"""The benchmarks run, in their small form, and print a line of JSON with what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Test suites (ours and other projects'), and Ray, which takes too long to start.
WITHOUT_SMALL = {"campaign", "peers_suites", "times", "ray_train"}
SCRIPTS = sorted(
    path.stem
    for path in BENCHMARKS.glob("*.py")
    if "def main()" in path.read_text() and path.stem not in WITHOUT_SMALL
)


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
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


def test_campaign_counts_what_pytest_says(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from campaign import counted

    lines = ["3 passed, 1 skipped, 9 deselected in 1.5s", "== short test summary info ==", "2 passed files"]
    found = counted([*lines, "= 1 failed, 22 passed, 1 error in 63.20s (0:01:03) ="])
    assert found == {"passed": 25, "skipped": 1, "failed": 1, "errors": 1}
