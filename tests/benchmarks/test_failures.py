"""Under the same kills every exact way to keep the state comes to the same end, and what is counted adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from plot import bars
from survive import Block, interval, mean_ratio, summary

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "failures.py",
            "--small",
            "--folder",
            tmp_path_factory.mktemp("failures"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["minutes"]["1"]


def test_the_job_is_killed_and_comes_to_its_end(found):
    assert {label.split(",")[0] for label in found} == {"exact", "save", "naive"}
    for about in found.values():
        assert about["finished"]
        assert about["redone_steps"] == about["lost_steps"]
    assert sum(about["failures"] for about in found.values()) > 0


def test_only_what_is_lossy_ends_elsewhere(found):
    for label, about in found.items():
        assert about["same_end"] or label.startswith("naive")


def test_a_save_at_every_step_loses_at_most_one_step_at_a_kill(found):
    about = found["save, every 1"]
    assert about["lost_steps"] <= about["failures"]


def test_bars_are_a_picture_with_what_did_not_finish():
    text = bars("A & B", {"one": {"x": 1.0, "y": 2.0}, "two": {"x": None}}, "s", least=0.5)
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "one", "two", "x", "y", "1.0 s", "2.0 s", "not finished"} == set(words)
    widths = [float(r.get("width")) for r in root.findall("{http://www.w3.org/2000/svg}rect")[3:]]
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-2) and widths[2] == 0


def test_a_slow_round_counts_on_both_sides_of_a_ratio():
    bare, arm = [[1.0, 1.0, 1.0], [10.0, 10.0]], [[1.1, 1.3], [11.0, 13.0, 12.0]]
    assert mean_ratio(arm, bare) == pytest.approx(1.2)
    low, high = interval(arm, bare)
    assert 1.1 <= low < 1.2 < high <= 1.3
    assert interval(arm, bare) == (low, high)


def test_a_summary_says_who_cannot_keep_up():
    bare = [Block([1.0, 1.0], [0.0, 0.0], [1, 2], 0, 100)]
    slow = summary([Block([1.0, 3.0], [0.1, 2.0], [0, 1], 50, 130)], bare)
    assert not slow["keeps_up"] and slow["overhead"] == 1.0 and slow["bytes_per_step"] == 25
    assert (
        slow["stall"]["p99"] == 2.0
        and slow["lag"] == {"median": 0.5, "most": 1}
        and slow["memory_bytes"] == 30
    )
    assert summary(bare, bare)["keeps_up"]
