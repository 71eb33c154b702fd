"""The store's benchmark runs and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_small_benchmark_prints_a_table_and_a_line_of_json(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/store.py"), "--small", "--folder", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    medians = json.loads(done.stdout.splitlines()[-1])["median"]
    assert list(medians) == ["raw write", "write", "raw read", "read", "publish"]
    assert all(value > 0 for value in medians.values())
    assert list(tmp_path.iterdir()) == []
