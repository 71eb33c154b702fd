"""``simulate``: both orders played on a machine, with and without the solver."""

import json
import sys

import pytest

SMALL = ["--model", "gpt-46m", "--machine", "cpu-2-core", "--micro-batches", "4"]
GPT = ["--model", "gpt-65b", "--machine", "a100-80g", "--micro-batches", "4"]


@pytest.fixture(scope="module")
def simulated():
    return {}


@pytest.fixture
def simulate(holdfast, simulated):
    """The JSON document of ``simulate`` with the options given, of which each is made once."""

    def call(*options):
        if options not in simulated:
            result = holdfast("simulate", *options, "--json")
            assert result.code == 0, result.err
            simulated[options] = result.out
        return json.loads(simulated[options])

    return call


@pytest.mark.slow
def test_vertical_beats_horizontal_on_the_golden_machine_by_what_the_facts_say(simulate):
    found = simulate(*GPT)
    assert (
        1.5 < found["speedup"] < 2.6
    )  # modelled: 2.1; 1.56 since tiles left both orders memory, horizontal more
    vertical, horizontal = found["orders"]["vertical"], found["orders"]["horizontal"]
    assert found["speedup"] == pytest.approx(vertical["tokens_per_second"] / horizontal["tokens_per_second"])
    assert vertical["tokens_per_second"] == pytest.approx(4 * 4 * 2048 / vertical["step_seconds"])
    assert vertical["busiest_seconds"] <= vertical["step_seconds"]
    assert max(vertical["host_bytes"], horizontal["host_bytes"]) <= 256e9
    assert vertical["busiest_lane"] == "ssd"


@pytest.mark.slow
def test_the_plan_that_is_played_is_that_of_plan(simulate, holdfast):
    """That with nothing delayed, whose parameters may stay in other places."""
    planned = json.loads(holdfast("plan", *GPT, "--delayed", "0", "--json").out)["in_whole_blocks"]
    vertical = simulate(*GPT)["orders"]["vertical"]
    assert vertical["step_seconds"] == pytest.approx(planned["step_seconds"], rel=0.1)
    assert vertical["on_host"]["params"] == pytest.approx(planned["on_host"]["params"], abs=1 / 80)


def test_what_plan_says_of_the_engine_is_what_the_simulator_says(simulate, holdfast):
    result = holdfast("plan", *SMALL, "--delayed", "0", "--json")
    planned = json.loads(result.out)["in_whole_blocks"]
    stated = [
        f"--{kind}-on-host={planned['on_host'][kind]}" for kind in ("params", "optimizer", "activations")
    ]
    played = simulate(*SMALL, *stated)["orders"]["vertical"]
    assert planned["simulated"]["step_seconds"] == pytest.approx(played["step_seconds"], rel=1e-3)
    assert planned["simulated"]["tokens_per_second"] == pytest.approx(played["tokens_per_second"], rel=1e-3)
    text = " ".join(holdfast("plan", *SMALL, "--delayed", "0").out.split())
    assert f"a step, {planned['simulated']['tokens_per_second']:,.0f} tokens/s" in text


def test_fractions_that_are_given_are_played(simulate):
    asked = ("--params-on-host", "0.5", "--optimizer-on-host", "0", "--activations-on-host", "1")
    found = simulate(*SMALL, *asked)
    for order in found["orders"].values():
        assert {k: v for k, v in order["on_host"].items() if k != "gradients"} == {
            "params": 0.5,
            "optimizer": 0.0,
            "activations": 1.0,
        }
        assert order["busy_seconds"]["ssd_write"] > 0


def test_a_timeline_is_of_one_step(simulate, holdfast):
    found = simulate(*SMALL)
    for order in found["orders"].values():
        line = order["timeline"]
        assert line["to"] - line["from"] == pytest.approx(order["step_seconds"], rel=0.1)
        assert all(len(parts) == 72 for parts in line["busy"].values())
        assert "compute" in line["busy"]
    lines = holdfast("simulate", *SMALL).out.splitlines()
    assert sum(line.startswith("  compute ") for line in lines) == 2
    assert lines[-1].startswith("Vertical is ")


def test_a_trace_is_written_where_asked(holdfast, tmp_path):
    path = tmp_path / "trace.json"
    result = holdfast("simulate", *SMALL, "--steps", "2", "--trace", path)
    assert result.code == 0
    assert result.out.splitlines()[-1] == f"Trace of 2 steps of each: {path}"
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"vertical", "horizontal"}


@pytest.mark.filterwarnings("always:the package highspy")
def test_without_the_solver_it_places_by_what_saves_most_and_says_so(monkeypatch, holdfast):
    monkeypatch.setitem(sys.modules, "highspy", None)
    result = holdfast("simulate", *SMALL)
    assert result.code == 0
    assert "the package highspy is not there (pip install 'holdfast[plan]')" in result.err
    none = holdfast("simulate", "--model", "gpt-46m", "--machine", "cpu-2-core")
    assert none.code == 2
    assert "--micro-batches was not given, and could not be chosen: placement by a linear" in none.err
    assert "pip install 'holdfast[plan]'" in holdfast("plan", *SMALL).err


@pytest.mark.parametrize(
    "options, text",
    [
        (["--model", "gpt-46m"], "--machine is missing"),
        ([*SMALL, "--trace", "/absent/trace.json"], "there is no directory /absent; make it first"),
        ([*SMALL, "--host", "100MB"], "of host memory"),
        (
            [
                "--model",
                "gpt-175b",
                "--machine",
                "rtx-4090",
                "--micro-batch-size",
                "56",
                "--micro-batches",
                "4",
            ],
            "of the device's memory, and it has 20.5 GiB",
        ),
    ],
)
def test_what_cannot_be_played_is_one_line_and_exit_2(holdfast, options, text):
    result = holdfast("simulate", *options)
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert text in result.err


def test_both_orders_keep_to_the_same_memory(simulate):
    """With 1.2 GB neither can keep everything; the process itself counts."""
    found = simulate(*SMALL, "--host", "1.2GB")
    for order in found["orders"].values():
        assert 0.6e9 < order["host_bytes"] <= 1.2e9
        assert order["on_host"]["optimizer"] < 1
