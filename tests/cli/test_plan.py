"""``plan --cadence``: what is given, what is assumed, what is printed and why."""

import json

import pytest

from holdfast.schedule.interval.snapshot_interval import Limits, optimum
from holdfast.schedule.interval.waste import MeasuredCosts, closed_form, waste

GIVEN = ["--step", "500ms", "--state", "1.5GB", "--record", "10MB", "--write", "1GB/s", "--mtbf", "6h"]

EVERYTHING_ELSE = """
    --read 2GB/s --base-stall 0.3s --base-steps 5 --record-stall 3ms --sync 10ms
    --write-slowdown 0.25 --replay 50ms --restart 30 --max-recovery 1min --max-storage 30GB
    --frozen 1GB --max-memory 1GiB --max-share 0.25 --retain 3
"""


@pytest.fixture
def cadence(holdfast):
    """The JSON document of ``plan --cadence`` with the usual options and more."""

    def call(*more):
        result = holdfast("plan", "--cadence", *GIVEN, *more, "--json")
        assert (result.code, result.err) == (0, "")
        return json.loads(result.out)

    return call


def test_without_cadence_it_says_what_it_can_do(holdfast):
    result = holdfast("plan")
    assert result.code == 0
    assert "holdfast plan --cadence finds how many steps" in result.out
    example = next(line for line in result.out.splitlines() if line.startswith("  holdfast plan"))
    assert holdfast(*example.split()[1:]).out.startswith("A base every ")


def options_by_title(text):
    """The options that ``--help`` lists, under each of its titles."""
    found, title = {}, None
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line.rstrip(":")
        elif title and line.startswith("  -"):
            found.setdefault(title, set()).add(line.split()[0].rstrip(","))
    return found


def test_help_lists_each_plan_by_itself(holdfast):
    found = options_by_title(holdfast("plan", "--help").out)
    titles = [
        "Placement of a model on a machine", "How often a base is made, with --cadence", "Limits, with --cadence",
        "Other options",
    ]  # fmt: skip
    assert list(found) == titles
    placement, cadence, limits, others = found.values()
    everything = {word for word in [*GIVEN, *EVERYTHING_ELSE.split(), "--cadence"] if word.startswith("--")}
    assert cadence | limits == everything - {"--retain"}
    assert limits == {option for option in everything if option.startswith("--max-")}
    assert others == {"--retain", "--json", "-h"}
    assert {"--model", "--machine", "--ssd-steps", "--delayed"} <= placement


def test_every_quantity_and_limit_can_be_given(cadence):
    found = cadence(*EVERYTHING_ELSE.split())
    measured = MeasuredCosts(
        step_seconds=0.5,
        full_bytes=1_500_000_000,
        record_bytes=10_000_000,
        write_bytes_per_second=1_000_000_000,
        read_bytes_per_second=2_000_000_000,
        base_stall_seconds=0.3,
        base_steps=5,
        record_stall_seconds=0.003,
        sync_seconds=0.01,
        write_slowdown=0.25,
        replay_seconds=0.05,
        restart_seconds=30,
        mean_seconds_between_failures=21600,
        frozen_bytes=1_000_000_000,
    )
    limits = Limits(
        recovery_seconds=60,
        storage_bytes=30_000_000_000,
        host_bytes=1024**3,
        bandwidth_share=0.25,
        retain=3,
    )
    assert MeasuredCosts(**found["measured"]) == measured
    assert Limits(**found["limits"]) == limits
    assert found["assumed"] == []
    best = optimum(measured, limits)
    assert found["steps_between_bases"] == found["base_every"] == best.steps
    assert found["wasted_seconds_per_hour"]["total"] == pytest.approx(best.waste.total)
    assert found["closed_form"] == {"steps": pytest.approx(closed_form(measured))}


def test_what_is_not_given_is_assumed_and_said(cadence, holdfast):
    found = cadence()
    assert found["measured"]["base_steps"] == 23  # of 64 MiB
    assert found["measured"]["read_bytes_per_second"] == 1e9
    assert found["measured"]["base_stall_seconds"] == pytest.approx(1.5e9 / (4 * 1024**3))
    assert found["measured"]["replay_seconds"] == 0.05
    assert {"base_steps", "replay_seconds", "sync_seconds"} < set(found["assumed"])
    assert not {"step_seconds", "record_bytes", "mean_seconds_between_failures"} & set(found["assumed"])
    text = " ".join(holdfast("plan", "--cadence", *GIVEN).out.split())
    assert "replay seconds 0.05 s" in text.partition("assumed ")[2]
    assert cadence("--replay", "60ms")["measured"]["replay_seconds"] == 0.06


def test_the_curve_is_of_the_model_and_has_the_best_in_its_valley(cadence):
    found = cadence("--max-storage", "6GB")
    measured = MeasuredCosts(**found["measured"])
    points = {point["steps"]: point for point in found["curve"]}
    for steps, point in points.items():
        wasted = waste(measured, steps).total
        assert point["wasted_seconds_per_hour"] == pytest.approx(wasted)
    best = found["steps_between_bases"]
    assert found["binding"] == ["storage"]
    assert points[best]["forbidden_by"] == []
    assert points[2 * best]["forbidden_by"] == ["storage"]
    assert points[min(points)]["forbidden_by"] == ["making a base", "bandwidth share"]
    allowed = [p["wasted_seconds_per_hour"] for p in found["curve"] if not p["forbidden_by"]]
    assert min(allowed) == points[best]["wasted_seconds_per_hour"]


def test_what_is_used_of_each_limit(cadence):
    uses = cadence("--max-storage", "6GB")["uses"]
    assert uses["storage_bytes"] == {"most": 6_000_000_000, "limit": 6_000_000_000}
    assert uses["recovery_seconds"]["limit"] == 300
    assert 0 < uses["bandwidth_share"]["most"] < uses["bandwidth_share"]["limit"] == 0.5


def test_a_person_reads_the_optimum_the_terms_the_curve_and_why(holdfast, cadence):
    found = cadence("--max-storage", "6GB")
    result = holdfast("plan", "--cadence", *GIVEN, "--max-storage", "6GB")
    lines = result.out.splitlines()
    assert lines[0].startswith("A base every 42 steps (21.0 s). A base takes")
    assert lines[1].startswith(
        f"Expected waste: {found['wasted_seconds_per_hour']['total']:.1f} s of an hour"
    )
    for name, value in found["wasted_seconds_per_hour"].items():
        if name != "total":
            start = f"{name.replace('_', ' ')} "
            [shown] = [line[len(start) :].split()[0] for line in lines if line.startswith(start + " ")]
            assert float(shown) == pytest.approx(value, abs=0.006)
    bars = {int(line.split()[0]): line.count("#") for line in lines if "#" in line}
    assert list(bars) == [point["steps"] for point in found["curve"]]
    assert max(bars.values()) == 40
    assert bars[5] > bars[10] > bars[21] > bars[42] > bars[84]
    assert [line.split()[0] for line in lines if "  best" in line] == ["42"]
    assert "What binds: storage." in " ".join(result.out.split())


def test_where_nothing_binds_it_says_so(holdfast):
    assert "No limit binds." in " ".join(holdfast("plan", "--cadence", *GIVEN).out.split())


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--step", "1s"], "--cadence needs --state, --write; `holdfast plan` shows an example"),
        ([*GIVEN, "--replay", "5 parsecs"], "--replay: '5 parsecs' is not a time; write it like 30min"),
        ([*GIVEN, "--record", "much"], "--record: 'much' is not a number of bytes; write it like 20GiB"),
        ([*GIVEN, "--mtbf", "0"], "--mtbf must be positive and finite, got 0.0"),
        ([*GIVEN, "--max-share", "2"], "--max-share must lie above 0 and be at most 1, got 2.0"),
        ([*GIVEN, "--max-storage", "1GB"], "1000000000 are allowed"),
        ([*GIVEN, "--record", "1GB"], "records alone take 200.0% of the write bandwidth"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_2(holdfast, arguments, text):
    result = holdfast("plan", "--cadence", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert text in result.err


def test_it_says_what_a_run_would_choose_that_may_leave_records_out(cadence, holdfast):
    cheap, dear = cadence(), cadence("--record-stall", "100ms")
    assert cheap["auto"]["every"] == 1 and dear["auto"]["every"] > 1
    assert dear["auto"]["recorded_waste"] - dear["auto"]["alone_waste"] > 0.1
    text = " ".join(holdfast("plan", "--cadence", *GIVEN, "--record-stall", "100ms").out.split())
    assert f"every=auto a base every {dear['auto']['every']} steps" in text
