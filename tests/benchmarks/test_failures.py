"""Under the same kills every exact way to keep the state comes to the same end, and what is counted adds up."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from failures import best_bases, page, picture, summary
from jobs import Outcome, kills
from plot import bars
from survive import Block, interval, mean_ratio, quantile_ratio
from survive import summary as summary_of_steps

from holdfast.schedule.interval.snapshot_interval import Limits
from holdfast.schedule.interval.tuner import FIRST_STEPS
from holdfast.schedule.interval.waste import MeasuredCosts
from support.warm_python import environment_of, run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.timeout(300)

MEASURED = MeasuredCosts(
    step_seconds=0.2, full_bytes=70_000_000, record_bytes=23_000_000, write_bytes_per_second=1e9,
    read_bytes_per_second=2e9, base_stall_seconds=0.05, replay_seconds=0.01, restart_seconds=0.4,
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    words = (BENCHMARKS / "failures.py", "--small", "--folder", tmp_path_factory.mktemp("failures"))
    needed = ["transformers.models.gpt2.modeling_gpt2"]
    done = run_python(*words, env=environment_of(), modules=needed, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_job_is_killed_and_comes_to_its_end(found):
    arms = found["minutes"]["1"]["arms"].values()
    assert {about["name"] for about in arms} == {"exact", "save", "naive"}
    for about in arms:
        assert about["finished"]
        assert about["redone_steps"] == about["lost_steps"]
    assert sum(about["failures"] for about in arms) > 0


@pytest.mark.slow
def test_only_what_is_lossy_ends_elsewhere(found):
    for about in found["minutes"]["1"]["arms"].values():
        assert about["same_end"] or about["name"] == "naive"


@pytest.mark.slow
def test_a_save_at_every_step_loses_at_most_one_step_at_a_kill(found):
    about = found["minutes"]["1"]["arms"]["save, every 1"]
    assert about["lost_steps"] <= about["failures"]


@pytest.mark.slow
def test_bases_are_as_far_apart_as_the_model_says(found):
    [about] = [about for about in found["minutes"]["1"]["arms"].values() if about["name"] == "exact"]
    measured = MeasuredCosts(**found["measured"]["exact"])
    assert measured.base_stall_seconds > 0 and measured.replay_seconds > 0
    assert about["base_every"] >= 1
    limits = Limits(storage_bytes=10**13, recovery_seconds=10_000.0)
    apart = [best_bases(MEASURED, limits, mean) for mean in (60.0, 6_000.0)]
    assert apart[1] == pytest.approx(10 * apart[0], rel=0.1)  # as the root of the time between failures


def test_bases_that_no_limit_allows_are_as_far_apart_as_before_anything_was_measured():
    assert best_bases(MEASURED, Limits(storage_bytes=1), 60.0) == FIRST_STEPS


def test_what_is_wasted_is_told_apart():
    bare = [Outcome(seconds=seconds, step_seconds=0.5, digest=7) for seconds in (9.0, 11.0)]
    killed = Outcome(
        seconds=14.0, failures=2, lost_steps=2, redone_steps=2, restart_seconds=1.5, finished=True, digest=7
    )
    about = summary([killed, killed], bare)
    assert about["wasted"] == pytest.approx(0.4) and about["restarting"] == pytest.approx(0.15)
    assert about["redoing"] == pytest.approx(0.1) and about["saving"] == pytest.approx(0.15)
    assert about["finished"] and about["same_end"]
    assert not summary([killed, replace(killed, digest=8)], bare)["same_end"]


def test_kills_are_as_far_apart_as_the_mean_and_the_same_for_all():
    for repeat in range(3):
        gaps = list(itertools.islice(kills(5.0, repeat), 1000))
        assert statistics.mean(gaps) == pytest.approx(5.0, rel=0.02)
        assert statistics.median(gaps) == pytest.approx(5.0 * math.log(2), rel=0.02)
        assert gaps[:50] == list(itertools.islice(kills(5.0, repeat), 50))
    assert next(kills(5.0, 0)) != next(kills(5.0, 1))


@pytest.mark.slow
def test_the_page_and_the_picture_have_every_line(found):
    text = page(found["minutes"], found["step_seconds"], found["compression"], found["repeats"])
    assert found["commit"].rstrip("+") in text
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(found["minutes"]["1"]["arms"])
    assert len({line.count("|") for line in lines}) == 1
    ElementTree.fromstring(picture(found["minutes"], found["compression"]))


def test_bars_are_a_picture_with_what_did_not_finish():
    text = bars("A & B", {"one": {"x": 1.0, "y": 2.0}, "two": {"x": None, "y": -1.0}}, "s")
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "one", "two", "x", "y", "1.0 s", "2.0 s", "-1.0 s", "not finished"} == set(words)
    widths = [float(r.get("width")) for r in root.findall("{http://www.w3.org/2000/svg}rect")[3:]]
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-2) and widths[2] == widths[3] == 0


def test_a_slow_round_counts_on_both_sides_of_a_ratio():
    bare, arm = [[1.0, 1.0, 1.0], [10.0, 10.0]], [[1.1, 1.3], [11.0, 13.0, 12.0]]
    assert mean_ratio(arm, bare) == pytest.approx(1.2)
    low, high = interval(arm, bare)
    assert 1.1 <= low < 1.2 < high <= 1.3
    assert interval(arm, bare) == (low, high)


def test_a_summary_says_who_cannot_keep_up():
    bare = [Block([1.0, 1.0], [0.0, 0.0], [1, 2], 0, 100)]
    slow = summary_of_steps([Block([1.0, 3.0], [0.1, 2.0], [0, 1], 50, 130)], bare)
    assert not slow["keeps_up"] and slow["overhead"] == 1.0 and slow["bytes_per_step"] == 25
    assert (
        slow["stall"]["p99"] == 2.0
        and slow["lag"] == {"median": 0.5, "most": 1}
        and slow["memory_bytes"] == 30
    )
    assert summary_of_steps(bare, bare)["keeps_up"]


def test_a_quantile_is_compared_with_the_same_one():
    bare, arm = [[1.0] * 9 + [2.0], [1.0] * 10], [[1.5] * 9 + [6.0], [1.5] * 10]
    value, low, high = quantile_ratio(arm, bare, 0.5)
    assert value == low == high == 1.5
    value, low, high = quantile_ratio(arm, bare, 0.99)
    assert value == 3.0 and low < value < high
    assert summary_of_steps([Block(r, r, [0] * 10) for r in arm], [Block(r, r, [0] * 10) for r in bare])[
        "step"
    ]["median"] == [0.5, 0.5, 0.5]
