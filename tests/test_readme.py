"""The README's snippet is what it says: twelve lines that run as they stand, and go on when run again."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def snippet():
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def test_the_snippet_is_twelve_lines_that_fit_a_screen():
    lines = snippet().splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) <= 110


def test_the_snippet_runs_and_continues(tmp_path):
    def run(code):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-W", "error", "-c", code]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )

    first = run(snippet().replace("< 20", "< 3"))
    assert first.returncode == 0, first.stderr
    assert [line.split(":")[0] for line in first.stdout.splitlines()] == ["step 1", "step 2", "step 3"]
    second = run(snippet().replace("< 20", "< 5"))
    assert [line.split(":")[0] for line in second.stdout.splitlines()] == ["step 4", "step 5"]
