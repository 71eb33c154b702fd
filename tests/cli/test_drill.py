"""A drill: where a script's runs go, what is noted of its steps, and what a difference is put down to.

The scripts of tests/drilled run here in this process, and end in order where a kill would be; whole drills are in
tests/crash.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import drilling
from holdfast.cli.child_process import Child
from holdfast.cli.drill_findings import (
    Reason,
    Steps,
    first_difference,
    noise_of,
    other_runs_reason,
    resumed_reason,
    self_reason,
)
from holdfast.cli.main import app
from holdfast.errors import BadInput
from holdfast.supervised.attempt import VARIABLE, Attempt, shared_directory, training_directory
from holdfast.supervised.script_values import DATA, GENERATOR, VALUE, script_values

DRILLED = Path(__file__).parents[1] / "drilled"


@pytest.fixture
def random_kept():
    """What the scripts seed is as before for the next test."""
    before = torch.get_rng_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])


def start(monkeypatch, folder, name, until):
    """One start of a script in the drill of ``folder``; its lines."""
    gc.collect()  # of an earlier start nothing is left to find
    attempt = Attempt(folder, until)
    monkeypatch.setenv(VARIABLE, attempt.write()[VARIABLE])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DRILLED / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    monkeypatch.delenv(VARIABLE)
    steps = Steps(folder)
    steps.read()
    return steps


@pytest.fixture(scope="module")
def drills():
    return {}


@pytest.fixture
def drilled(monkeypatch, tmp_path_factory, random_kept, drills):
    """The lines of two uninterrupted runs of 6 steps, and of one resumed after step 3, once for each script."""

    def call(name):
        if name not in drills:
            folder = tmp_path_factory.mktemp(name)
            whole = [start(monkeypatch, folder / each, name, 6) for each in ("first", "second")]
            start(monkeypatch, folder / "killed", name, 3)
            drills[name] = *whole, start(monkeypatch, folder / "killed", name, 6)
        return drills[name]

    return call


@pytest.mark.parametrize(
    "name, kind, named",
    [
        ("own_generator", "generator", "source in noises() (own_generator.py)"),
        ("no_position", "loader", "an iterator of a DataLoader"),
        ("own_value", "value", "damping.mean in main() (own_value.py)"),
    ],
)
def test_planted_fault_is_named(drilled, name, kind, named):
    first, second, killed = drilled(name)
    assert first_difference(first, second) is None
    found = first_difference(first, killed)
    assert (found.step, found.resumed) == (4, 3) and found.tensors
    reason = resumed_reason(found, noise_of(first, second))
    assert reason.kind == kind and named in reason.names


def test_sound_script_is_equal(drilled):
    first, second, killed = drilled("sound")
    assert first_difference(first, second) is None and first_difference(first, killed) is None
    assert killed.starts() == [0] and killed.last_step == first.last_step == 6
    assert not (Path("runs")).exists()


@pytest.mark.parametrize("resumed, equal", [(0, False), (3, True)])
def test_equal_states_show_nothing_where_nothing_was_resumed(tmp_path, monkeypatch, resumed, equal):
    job, steps = drilling._Drill(["train"], drilling.DrillOptions(), tmp_path, shows=True), Steps(tmp_path)
    monkeypatch.setattr(job, "_compare", lambda verdict, name: None)  # the states are equal
    verdict = drilling.Verdict(True, 6, [], kills=[{"resumed_after": 0}, {"resumed_after": resumed}])
    job._judge(verdict, steps, steps, steps)
    assert verdict.equal == equal and (verdict.reason is None) == equal


def test_script_unlike_itself_is_told_by_its_data(monkeypatch, tmp_path, random_kept):
    first, second = (start(monkeypatch, tmp_path / each, "unlike_itself", 4) for each in ("first", "second"))
    found = first_difference(first, second)
    reason = self_reason(found)
    assert reason.kind == "data" and "batch in main() (unlike_itself.py)" in reason.names


def test_other_initial_values_are_told(monkeypatch, tmp_path):
    lines = []
    for each in ("first", "second"):
        attempt = Attempt(tmp_path / each, 2)
        monkeypatch.setenv(VARIABLE, attempt.write()[VARIABLE])
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
            checkpointer.resume()
        lines.append(Steps(attempt.folder))
        lines[-1].read()
    assert first_difference(*lines).step == 0
    assert self_reason(first_difference(*lines)).kind == "initial-values"


def test_another_run_is_told(monkeypatch, tmp_path, random_kept):
    start(monkeypatch, tmp_path, "another_run", 3)
    steps = start(monkeypatch, tmp_path, "another_run", 3)
    assert len(steps.runs) == 2 and len(Attempt(tmp_path, 0).opened()) == 2
    reason = other_runs_reason(list(Attempt(tmp_path, 0).opened().values()))
    assert steps.runs == ["run-0", "run-1"] and reason.kind == "another-run" and len(set(reason.names)) == 2


def test_real_run_is_not_touched(monkeypatch, tmp_path):
    run = tmp_path / "run"
    attempt = Attempt(tmp_path / "drill", 3)
    monkeypatch.setenv(VARIABLE, attempt.write()[VARIABLE])
    directory = training_directory(run)
    assert directory.is_relative_to(tmp_path / "drill") and training_directory(directory) == directory
    assert (
        training_directory(os.path.relpath(run))
        == directory
        != training_directory(tmp_path / "other" / "run")
    )
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    model.forward = lambda x: model[2](model[1](model[0](x))).square().mean()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = holdfast.offload(model, optimizer, run, precision="fp32")
    with pytest.raises(SystemExit):
        for _ in range(9):
            engine.step([(torch.ones(1, 4),)])
    steps = Steps(attempt.folder)
    steps.read()
    assert steps.last_step == 3 and steps.runs == [directory.name]
    assert (directory / "commits").is_dir() and not run.exists()


def test_nodes_are_left_out(monkeypatch, tmp_path):
    """A drill runs on one machine, where all ranks would be on one node."""
    attempt = Attempt(tmp_path / "drill", 1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"model": model, "optimizer": optimizer, "nodes": holdfast.LocalDisks()}
    with pytest.raises(BadInput, match="there is one process"):
        holdfast.Checkpointer(tmp_path / "run", **options)
    monkeypatch.setenv(VARIABLE, attempt.write()[VARIABLE])
    with holdfast.Checkpointer(tmp_path / "run", **options) as checkpointer:
        assert checkpointer.resume() == 0


def test_a_folder_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(BadInput):
        training_directory("runs/x")


class Thing:
    def __init__(self):
        self.count, self.next = 3, self


def test_values_of_the_script_are_found():
    thing, numbers, batch = Thing(), {"a": [1, 2.5]}, torch.arange(3)
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.ones(2))
    before = script_values()
    where = " in test_values_of_the_script_are_found() (test_drill.py)"
    assert before[f"thing.count{where}"][0] == before[f"numbers['a'][1]{where}"][0] == VALUE
    assert before[f"batch{where}"][0] == DATA and before[f"generator{where}"][0] == GENERATOR
    assert f"weight{where}" not in before
    torch.randn(1, generator=generator)
    thing.count += 1
    after = script_values()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"generator{where}", f"thing.count{where}"} and len(weight) + len(batch) == 5
    assert numbers


def test_all_that_a_child_started_is_killed(tmp_path):
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True); open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(60)"
    )
    told = tmp_path / "pid"
    child = Child([sys.executable, "-c", code, str(told)], {})
    while not told.exists() or not told.read_text():
        assert child.poll() is None
    pid = int(told.read_text())
    child.kill()
    status = Path(f"/proc/{pid}/stat")
    assert child.poll() == -9 and (
        not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    )


def test_unstartable_command_is_refused(capsys):
    with pytest.raises(BadInput, match="cannot be started"):
        app(args=["drill", "--", "/no/such/program"], standalone_mode=False)


@pytest.mark.parametrize(
    "code, text",
    [
        ("print('hello')", "recorded 0 steps"),
        ("import sys; sys.exit('no data here')", "exit code 1. Its last lines: no data here"),
        ("import time; time.sleep(60)", "no step was recorded in 1 s"),
    ],
)
def test_script_that_records_no_step_is_refused(code, text):
    with pytest.raises(BadInput, match=text):
        app(args=["drill", "--timeout", "1", "--", sys.executable, "-c", code], standalone_mode=False)


def test_folder_to_keep_has_to_be_empty(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(BadInput, match="something already"):
        app(args=["drill", "--keep", str(tmp_path), "--", "true"], standalone_mode=False)


def line(step, **parts):
    return {"event": "step", "start": 0, "step": step, "time": 0.0, "tensors": {"w/param": "1"}, "progress": {},
            "script": {}} | parts  # fmt: skip


def of(tmp_path, name, *lines):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "steps-run-0-00000.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    steps = Steps(folder)
    steps.read()
    return steps


def test_generator_that_no_step_draws_from_is_not_blamed(tmp_path):
    """Python's, which few scripts seed, and on which nothing depends."""
    first = of(
        tmp_path, "a", *(line(i, progress={"random.python": "p", "random.torch": f"{i}"}) for i in (1, 2))
    )
    second = of(
        tmp_path, "b", *(line(i, progress={"random.python": "q", "random.torch": f"{i}"}) for i in (1, 2))
    )
    other = {"random.python": "r", "random.torch": "2"}
    killed = of(tmp_path, "c", line(2, tensors={"w/param": "2"}, progress=other))
    found = first_difference(first, killed)
    assert found.step == 2 and self_reason(found).kind == "unknown"
    assert resumed_reason(found, noise_of(first, second)).kind == "unknown"
    drawn = of(tmp_path, "d", line(2, tensors={"w/param": "2"}, progress=other | {"random.torch": "3"}))
    found = first_difference(first, drawn)
    assert (
        self_reason(found).kind == resumed_reason(found, noise_of(first, second)).kind == "global-generator"
    )


def test_step_that_is_done_again_after_a_rollback_is_no_difference(tmp_path):
    steps = (line(1), line(2), line(2, tensors={"w/param": "2"}), line(3))
    first, second = of(tmp_path, "a", *steps), of(tmp_path, "b", *steps)
    assert first_difference(first, second) is None
    other = of(tmp_path, "c", line(1), line(2, tensors={"w/param": "3"}))
    assert first_difference(first, other).step == 2


def test_restored_state_that_differs_is_told(tmp_path):
    first = of(tmp_path, "a", line(1), line(2))
    killed = of(tmp_path, "b", line(1, event="begun", tensors={"w/param": "9"}))
    found = first_difference(first, killed)
    assert (found.step, found.resumed) == (1, 1)
    assert resumed_reason(found, {}).kind == "restored-otherwise"


def test_other_hyper_parameters_are_told(tmp_path):
    first = of(tmp_path, "a", line(1, progress={"groups[0].lr": "1"}))
    other = of(tmp_path, "b", line(1, tensors={"w/param": "2"}, progress={"groups[0].lr": "2"}))
    assert resumed_reason(first_difference(first, other), {}).kind == "hyper-parameters"


def test_page_shows_what_a_drill_prints(monkeypatch, tmp_path, drilled):
    """The sentences of docs/survives.md, whose script is called train.py."""
    page = (DRILLED.parents[1] / "docs" / "survives.md").read_text()
    first, second, killed = drilled("own_generator")
    text = resumed_reason(first_difference(first, killed), noise_of(first, second)).text
    assert f"likely reason: {text.replace('own_generator.py', 'train.py')}\n" in page
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    job = drilling._Drill(["train"], drilling.DrillOptions(), tmp_path, shows=True)
    verdict = drilling.Verdict(True, 6, first.runs)
    job._tell_difference(verdict, first_difference(first, killed), Reason("kind", "text", "way out"))
    told = out.getvalue().splitlines()[0].replace("step 4", "step 8").replace("step 3", "step 7")
    assert told in page


def test_ranks_with_a_directory_on_each_node_share_one_in_a_drill(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    Attempt(tmp_path, 5).write()
    first: list[Path] = []

    class Both:
        """Two ranks, of which the first does everything."""

        def everyone(self, value):
            return [value, value]

        def first_does(self, what):
            first.extend([] if first else [what()])
            return first[0]

    for run in ("node-0/run", "node-1/run"):
        assert shared_directory(run, Both(), has_nodes=True) == first[0]
    assert len(Attempt(tmp_path, 5).opened()) == 1
    assert shared_directory("node-1/run", Both(), has_nodes=False) != first[0]
