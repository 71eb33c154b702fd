"""``holdfast train``: one command that starts, continues, extends and refuses."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

from holdfast import __version__ as holdfast_version
from holdfast.cli.train import announce, orderly_stop
from holdfast.cli.train.engine_build import learning_rate_factor
from holdfast.cli.train.train_job import Job
from holdfast.config import load_config
from holdfast.events import read_events
from holdfast.monitor.training_panel import TrainingPanel
from support.tiny_keys import TINY, words

KEYS = TINY | {
    "train.warmup_steps": 2, "train.steps": 4, "train.learning_rate": 1e-2, "model.dropout": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Five thousand bytes of a small vocabulary."""
    path = tmp_path_factory.mktemp("text") / "text"
    words = ["def ", "return ", "self", "(", ")", ":\n", "    "]
    path.write_text("".join(random.Random(0).choices(words, k=2000))[:5000])
    return path


@pytest.fixture
def arguments(text):
    """The command line of a tiny run in a directory, with other keys over it."""

    def of(run, **sets):
        keys = KEYS | {"run.dir": run, "data.text": text} | {k.replace("__", "."): v for k, v in sets.items()}
        return ["train", *words(keys)]

    return of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Where ``uninterrupted`` keeps its run."""
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.fixture
def uninterrupted(finished, arguments, holdfast):
    """A run of 4 steps from beginning to end, trained once; and what it printed."""
    if not finished.exists():
        result = holdfast(*arguments(finished))
        assert result.code == 0, result.err
        (finished / "printed").write_text(result.out)
    return finished


def events_of(run, kind):
    return [event for event in read_events(run / "events.jsonl") if event["event"] == kind]


def steps_of(run):
    return [event["step"] for event in events_of(run, "step")]


def wait_for_steps(run, process, count):
    deadline = time.monotonic() + 60
    while not (run / "events.jsonl").exists() or len(steps_of(run)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_says_what_it_will_take_and_what_it_came_to(uninterrupted):
    printed = (uninterrupted / "printed").read_text()
    for said in (
        "parameters in 2 blocks",
        "1 file, 4.9 KiB",
        "needed,",
        "written and",
        "of an SSD's life if rated for 600 TB",
        "the budget is",
        "Validation loss 5.5",
        "step 4/4",
        "Finished step 4 of 4, which is durable, after ",
        "at step 0, and a uniform guess has 5.545.",
        "A sample of what it writes:",
        "    def ",
        f"show      holdfast show {uninterrupted}",
        f"verify    holdfast verify {uninterrupted}",
    ):
        assert said in printed, said
    assert "--set train.steps=8\n" in printed
    assert "train.steps=4" not in printed


def test_every_step_is_an_event(uninterrupted):
    steps = events_of(uninterrupted, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "seconds", "tokens", "durable_step", "read_bytes", "written_bytes"):
        assert all(isinstance(event[key], (int, float)) for event in steps), key
    assert steps[0]["tokens"] == 2 * 2 * 16
    assert [event["step"] for event in events_of(uninterrupted, "validation")] == [0, 4]
    assert events_of(uninterrupted, "run")[0]["config"]["model.width"] == 16
    assert events_of(uninterrupted, "finished")[0]["durable_step"] == 4


def test_the_loss_falls(uninterrupted):
    before, after = (event["loss"] for event in events_of(uninterrupted, "validation"))
    assert after < before - 0.5


def test_the_resolved_configuration_is_kept_in_the_run(uninterrupted, text):
    stored = load_config(uninterrupted / "config.toml")
    assert stored.model.width == 16
    assert stored.data.text == str(text)


def test_the_commits_of_a_finished_run_are_whole(uninterrupted, holdfast):
    rows = json.loads(holdfast("ls", uninterrupted, "--json").out)
    assert [row["step"] for row in rows] == [4, 3]
    assert holdfast("verify", uninterrupted).code == 0


def test_the_same_command_again_says_that_it_is_finished(uninterrupted, arguments, holdfast):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    result = holdfast(*arguments(uninterrupted))
    assert result.code == 0
    assert result.out.startswith("reading all of the newest step\n")
    assert "is finished: step 4 is durable and whole, and train.steps is 4." in result.out
    assert "train.steps=8" in result.out
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


@pytest.mark.slow
@pytest.mark.filterwarnings("always:resuming from step 3")
def test_a_finished_run_whose_newest_step_is_damaged_goes_on_from_an_older_one(
    uninterrupted, tmp_path, arguments, holdfast
):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    newest = json.loads((run / "commits" / "step-000000000004.t0001.json").read_text())
    path = run / next(iter(newest["files"].values()))["path"]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    result = holdfast(*arguments(run))
    assert result.err.startswith("warning: resuming from step 3 in spite of damage")
    assert "is finished" not in result.out
    assert "Continuing after step 3, the newest that is whole." in result.out
    assert holdfast("diff", run, uninterrupted).code == 0


@pytest.mark.slow
def test_a_configuration_that_says_the_same_keeps_its_comments(tmp_path, arguments, holdfast):
    run, path = tmp_path / "run", tmp_path / "run" / "config.toml"
    assert holdfast(*arguments(run, train__steps=1)).code == 0
    text = "# mine\n" + path.read_text().replace("\nsteps = 1 ", "\nsteps = 2 ")
    path.write_text(text)
    assert holdfast(*arguments(run, train__steps=2)).code == 0
    assert path.read_text() == text
    assert holdfast(*arguments(run, train__steps=3)).code == 0
    assert "# mine" not in path.read_text()


@pytest.mark.slow
def test_more_steps_extend_a_finished_run(uninterrupted, tmp_path, arguments, holdfast):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    result = holdfast(*arguments(run, train__steps=6, train__learning_rate=2e-2))
    assert result.code == 0, result.err
    assert "Changed from here on: train.steps 4 -> 6, train.learning_rate 0.01 -> 0.02." in result.out
    assert result.out.startswith("reading all of step 4\n")
    assert "Continuing after step 4" in result.out
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    assert result.err == ""
    first = events_of(run, "validation")[0]["loss"]
    assert f"it was {first:.3f} at step 0" in result.out


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_order_and_the_run_continues_bit_for_bit(
    uninterrupted, tmp_path, arguments, holdfast, holdfast_process, number
):
    run = tmp_path / "run"
    process = holdfast_process(*arguments(run, io__write_limit="400KB"))
    wait_for_steps(run, process, 1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    done = steps_of(run)[-1]
    assert done < 4
    assert f"Stopped by {signal.Signals(number).name} after step {done}, which is durable." in out
    assert "continue" in out
    assert f"{signal.Signals(number).name}: committing this step" in err
    assert json.loads(holdfast("ls", run, "--json").out)[0]["step"] == done
    assert holdfast(*arguments(run)).code == 0
    assert steps_of(run) == [1, 2, 3, 4]
    same = json.loads(holdfast("diff", run, uninterrupted, "--json").out)
    assert same["equal"] is True
    assert same["progress"] == []


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path, arguments, holdfast_process):
    run = tmp_path / "run"
    process = holdfast_process(*arguments(run, io__write_limit="100KB"))
    wait_for_steps(run, process, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    first, last = process.stderr.read().splitlines()
    assert first.startswith("SIGINT: ")
    assert re.match(r"Left at once; step \d+ is durable\. Continue with: \S+ -m holdfast train --set ", last)
    assert last.endswith("--set io.write_limit=100KB")


@pytest.mark.slow
def test_a_killed_run_continues_from_what_it_acknowledged(
    uninterrupted, tmp_path, arguments, holdfast, holdfast_process
):
    run = tmp_path / "run"
    process = holdfast_process(*arguments(run, io__write_limit="400KB"))
    wait_for_steps(run, process, 2)
    process.kill()
    process.wait()
    acknowledged = events_of(run, "step")[-1]["durable_step"]
    result = holdfast(*arguments(run))
    assert result.code == 0
    first = events_of(run, "run")[1]["first_step"]
    assert first >= acknowledged
    assert json.loads(holdfast("diff", run, uninterrupted, "--json").out)["equal"] is True


@pytest.mark.slow
def test_a_signal_after_the_last_step_leaves_out_the_sample(tmp_path, arguments, holdfast, monkeypatch):
    real = Job.report_end

    def interrupted(job, *rest):
        os.kill(os.getpid(), signal.SIGINT)
        return real(job, *rest)

    monkeypatch.setattr(Job, "report_end", interrupted)
    result = holdfast(*arguments(tmp_path / "run"))
    assert result.code == 0
    assert "Finished step 4 of 4, which is durable" in result.out
    assert events_of(tmp_path / "run", "finished")[0]["sample"] == ""


@pytest.mark.slow
def test_a_signal_in_the_last_step_comes_too_late_to_stop_the_run(tmp_path, arguments, holdfast, monkeypatch):
    real = TrainingPanel.step

    def interrupted(panel, event):
        if event["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return real(panel, event)

    monkeypatch.setattr(TrainingPanel, "step", interrupted)
    result = holdfast(*arguments(tmp_path / "run"))
    assert "Finished step 4 of 4" in result.out
    assert "Stopped" not in result.out


@pytest.mark.slow
def test_a_sample_ends_when_it_takes_too_long(tmp_path, arguments, holdfast, monkeypatch):
    monkeypatch.setattr("holdfast.cli.train.train_job.SAMPLE_SECONDS", 0.0)
    assert holdfast(*arguments(tmp_path / "run", train__steps=1)).code == 0
    assert events_of(tmp_path / "run", "finished")[0]["sample"] == ""


def test_a_key_press_while_the_run_is_prepared_leaves_nothing_behind(
    tmp_path, arguments, holdfast, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.train.train_job.make_engine", interrupted)
    result = holdfast(*arguments(tmp_path / "run"))
    assert (result.code, result.err) == (130, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_error_in_a_step_is_an_event_and_the_run_goes_on_from_before(
    uninterrupted, tmp_path, arguments, holdfast, monkeypatch
):
    def broken(*_):
        raise OSError("the text is gone")

    run = tmp_path / "run"
    keys = {"data__validation_fraction": 0}
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.data.corpus.Corpus.window", broken)
        result = holdfast(*arguments(run, **keys))
    assert result.code == 3
    assert result.err == "error: the text is gone\n"
    assert events_of(run, "failed")[0]["error"] == "OSError: the text is gone"
    assert holdfast(*arguments(run, **keys)).code == 0
    assert steps_of(run) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_in_order_too(tmp_path, arguments, holdfast, monkeypatch):
    real = Job.validate

    def interrupted(job):
        os.kill(os.getpid(), signal.SIGINT)
        return real(job)

    monkeypatch.setattr(Job, "validate", interrupted)
    result = holdfast(*arguments(tmp_path / "run"))
    assert result.code == 0
    assert "Stopped by SIGINT after step 0, which is durable." in result.out
    assert steps_of(tmp_path / "run") == []


@pytest.mark.slow
def test_two_writers_of_one_run_are_told_apart(tmp_path, arguments, holdfast, holdfast_process):
    run = tmp_path / "run"
    process = holdfast_process(*arguments(run, io__write_limit="50KB"))
    wait_for_steps(run, process, 1)
    result = holdfast(*arguments(run))
    assert result.code == 2
    assert f"process {process.pid} on " in result.err


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("streams", [["stdout"], ["stdout", "stderr"]])
def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path, arguments, holdfast_process, streams):
    run = tmp_path / "run"
    process = holdfast_process(*arguments(run, io__write_limit="400KB"))
    wait_for_steps(run, process, 1)
    for stream in streams:
        getattr(process, stream).close()
    assert process.wait(timeout=60) == 0
    assert [event["step"] for event in events_of(run, "finished")] == [4]
    assert "stderr" in streams or process.stderr.read() == ""


@pytest.mark.slow
def test_a_run_that_nobody_reads_is_stopped_in_order(tmp_path, arguments, holdfast_process):
    run = tmp_path / "run"
    process = holdfast_process(*arguments(run, io__write_limit="400KB"))
    process.stdout.close()
    process.stderr.close()
    wait_for_steps(run, process, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    [stopped] = events_of(run, "stopped")
    assert stopped["durable_step"] == stopped["step"]


@pytest.mark.slow
def test_without_commits_a_run_says_so_when_it_is_stopped(tmp_path, arguments, holdfast_process):
    run = tmp_path / "run"
    process = holdfast_process(*arguments(run, durability__every=0, train__steps=10_000))
    wait_for_steps(run, process, 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "nothing was committed: durability.every is 0" in out


@pytest.mark.slow
def test_a_run_without_held_out_text_has_no_validation(tmp_path, arguments, holdfast):
    result = holdfast(*arguments(tmp_path / "run", data__validation_fraction=0, train__steps=1))
    assert result.code == 0, result.err
    assert "Validation" not in result.out


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"train__stepps": 1}, "did you mean train.steps?"),
        ({"model__width": 17}, "model.width = 17: must be a multiple of 2 * model.heads = 4"),
        ({"data__text": "/nowhere"}, "the text '/nowhere' does not exist"),
        ({"model__context": 4000}, "at least 8,001 are needed"),
        ({"offload__host_budget": "1MiB"}, "budget"),
        ({"offload__device": "abacus"}, "offload.device = 'abacus'"),
        ({"offload__device": "cuda:99"}, "offload.device = 'cuda:99': this machine has cpu"),
        ({"offload__device": "cuda:99"}, "; --set offload.device=cpu"),
    ],
)
def test_bad_input_is_one_clear_line_and_writes_nothing(tmp_path, arguments, holdfast, wrong, said):
    result = holdfast(*arguments(tmp_path / "run", **wrong))
    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_is_printed_with_what_was_set(holdfast, tmp_path):
    result = holdfast("train", "--set", "train.steps=7", "--print-config")
    assert result.code == 0
    (tmp_path / "printed.toml").write_text(result.out)
    assert load_config(tmp_path / "printed.toml") == load_config(None, ["train.steps=7"])


@pytest.mark.parametrize(
    "words, said",
    [
        (["--sett", "x"], "No such option: --sett"),
        (["--set"], "Option '--set' requires an argument."),
        (["a.toml", "b.toml"], "Got unexpected extra argument"),
    ],
)
def test_wrong_usage_is_one_clear_line_too(holdfast, words, said):
    result = holdfast("train", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {said}")
    assert result.err.endswith(" `holdfast --help` and `holdfast VERB --help` say more.\n")
    assert len(result.err.splitlines()) == 1


def test_a_verb_that_is_not_there_is_one_clear_line_too(holdfast):
    result = holdfast("tran")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert result.err.startswith("error: No such command 'tran'.")


def test_without_a_verb_it_says_what_there_is_and_how_it_ends(holdfast):
    bare, asked = holdfast(), holdfast("-h")
    assert (bare.code, bare.err) == (0, "")
    assert bare.out.rstrip() == asked.out.rstrip()
    for said in ("train ", "ls ", "show ", "verify ", "diff ", "Exit codes: 0 good;"):
        assert said in bare.out
    assert holdfast("--version").out == f"holdfast {holdfast_version}\n"


def test_an_unexpected_error_is_one_line_and_a_traceback_on_demand(holdfast, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("holdfast.config.load_config", broken)
    result = holdfast("train")
    assert result.code == 3
    assert (
        result.err
        == "error: ZeroDivisionError: division by zero (unexpected; HOLDFAST_DEBUG=1 shows where)\n"
    )
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    assert "Traceback" in holdfast("train").err


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    factors = [learning_rate_factor(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert learning_rate_factor(0, 0, 1) == 1.0
    assert learning_rate_factor(500, 10, 100) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "written, said",
    [
        (81 * 2**20 * 320, "25.3 GiB in all, 0.0045 %"),
        (600 * 10**9, "0.1 %"),
        (60 * 10**12, "10 %"),
        (1200 * 10**12, "200 %"),
        (0, "0 B in all, 0 %"),
    ],
)
def test_wear_is_said_in_two_digits_with_its_assumption(written, said):
    assert said in announce.wear(written)
    assert "if rated for 600 TB" in announce.wear(written)


def test_a_sample_shows_control_characters_and_keeps_its_lines(capsys):
    text = "f(x):\n\tif [red]\x1b[31m:\r\x00\n\n" + "y" * 80
    written = announce.print_sample(Console(width=80), "def ", text)
    lines = capsys.readouterr().out.split("\n")
    assert lines[3:5] == ["    def f(x):", "        if [red]�[31m:��"]
    assert lines[5:] == ["", "    " + "y" * 76, "    yyyy", ""]
    assert written == text


@pytest.fixture
def terminal():
    """A terminal of its own, as a file descriptor."""
    leader, follower = os.openpty()
    yield follower
    os.close(leader)
    os.close(follower)


def test_a_stop_request_keeps_keys_out_of_the_picture_and_gives_them_back(terminal, monkeypatch):
    monkeypatch.setattr(orderly_stop, "TERMINAL", terminal)
    before = termios.tcgetattr(terminal)
    assert before[3] & termios.ECHO
    with orderly_stop.StopRequest(lambda _: None, str):
        assert not termios.tcgetattr(terminal)[3] & termios.ECHO
        assert termios.tcgetattr(terminal)[3] & termios.NOFLSH
    assert termios.tcgetattr(terminal) == before


BACKGROUND = """
import fcntl, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
code = "from holdfast.cli.train.orderly_stop import quiet_keys; print(quiet_keys())"
print(subprocess.run([sys.executable, "-c", code], process_group=0, capture_output=True, timeout=20).stdout)
"""


def test_a_run_in_the_background_leaves_the_terminal_alone(terminal):
    """A background process that changes its terminal's settings is stopped by the kernel until it is called back."""
    done = subprocess.run(
        [sys.executable, "-c", BACKGROUND],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=terminal,
        capture_output=True,
        start_new_session=True,
        timeout=60,
    )
    assert done.stdout == b"b'None\\n'\n", done.stderr


def test_a_stop_request_gives_the_signals_back():
    before = [signal.getsignal(number) for number in orderly_stop.SIGNALS]
    said = []
    with orderly_stop.StopRequest(said.append, str) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested == "SIGTERM"
    assert said == ["SIGTERM: committing this step; again to leave at once"]
    assert [signal.getsignal(number) for number in orderly_stop.SIGNALS] == before
