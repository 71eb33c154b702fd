"""The event log: every line is whole JSON, whatever happened to the process before it."""

import json
import os
import threading

import numpy as np
import pytest

from holdfast.events import EventLog, describe_lost_steps, part_numbers, part_path, read_events
from support.warm_python import environment_of, run_python


def test_each_event_is_one_line_of_json_with_its_time(tmp_path):
    log = EventLog(tmp_path / "run" / "events.jsonl")
    log.emit("step", step=1, loss=2.5)
    log.emit("stop", reason="SIGINT\n")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["event"], first["step"], first["loss"]) == ("step", 1, 2.5)
    assert second["reason"] == "SIGINT\n"
    assert second["time"] >= first["time"] > 1e9


def test_an_event_is_in_the_file_before_emit_returns(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("step", step=1)
    assert len(list(read_events(tmp_path / "events.jsonl"))) == 1


def test_event_gets_into_no_other_file(tmp_path, monkeypatch):
    """The log is closed while another thread is on its way to write, and the next file gets the number."""
    log, entered, go = EventLog(tmp_path / "events.jsonl"), threading.Event(), threading.Event()
    log.emit("step", step=1)
    write = os.write

    def late(file, data):
        entered.set()
        go.wait(10)
        return write(file, data)

    monkeypatch.setattr(os, "write", late)
    emitting = threading.Thread(target=log.emit, args=("step",), kwargs={"step": 2})
    closing = threading.Thread(target=log.close)
    emitting.start()
    assert entered.wait(10)
    closing.start()
    closing.join(0.2)
    with open(tmp_path / "another", "wb"):
        go.set()
        emitting.join()
    closing.join()
    assert (tmp_path / "another").read_bytes() == b""
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [1, 2]


@pytest.mark.parametrize("torn_at", range(1, 30))
def test_a_line_torn_anywhere_is_skipped_and_hurts_no_other(tmp_path, torn_at):
    path = tmp_path / "events.jsonl"
    EventLog(path).emit("step", step=1, note="é")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-torn_at])
    EventLog(path).emit("step", step=2)
    # with the newline alone missing the torn line is whole
    assert [e["step"] for e in read_events(path)] == ([1, 1, 2] if torn_at == 1 else [1, 2])


def test_what_is_not_an_event_is_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'12\n\n{"event": "step"}\n\xff\n[1]\n')
    assert list(read_events(path)) == [{"event": "step"}]


def test_values_without_a_form_in_json_do_not_stop_training(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path).emit("step", loss=float("nan"), norm=np.float32(1.5), where=tmp_path, shape=(1, 2))
    [event] = read_events(path)
    assert (event["loss"], event["norm"], event["where"], event["shape"]) == (
        None,
        1.5,
        str(tmp_path),
        [1, 2],
    )


def test_a_log_that_fails_warns_once_and_goes_quiet(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.warns(UserWarning, match=r"no more events are written to .*events\.jsonl"):
        log.emit("step", step=1)
    log.emit("step", step=2)


def test_no_path_keeps_nothing():
    log = EventLog(None)
    log.emit("step", step=1)
    log.close()


def test_a_log_makes_nothing_before_its_first_event(tmp_path):
    log = EventLog(tmp_path / "run" / "events.jsonl")
    assert list(tmp_path.iterdir()) == []
    log.emit("step", step=1)
    assert [e["step"] for e in read_events(tmp_path / "run" / "events.jsonl")] == [1]


def test_what_was_lost_is_said(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    assert describe_lost_steps(log.path, 3) == "No later step is known."
    log.emit("step", step=9)  # of a process before, whose steps were left on purpose
    log.emit("checkpointer", first_step=2)
    log.emit("step", step=3)
    assert describe_lost_steps(log.path, 3) == "No later step is known."
    log.emit("step", step=5)
    assert describe_lost_steps(log.path, 4).startswith("Lost: step 5 was done and not durable")
    assert describe_lost_steps(log.path, 3).startswith("Lost: steps 4 to 5 were done and not durable")
    log.emit("step", step=6, durable_step=5)
    log.emit("step", durable_step=None)  # a line of the script's own
    assert describe_lost_steps(log.path, 5).startswith("Lost: step 6 was done and not durable")
    assert describe_lost_steps(log.path, 4).startswith(
        "Later steps, to 5, had been durable: files of journal/ or commits/"
    )


@pytest.mark.slow
def test_a_resume_is_one_line_on_standard_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""if True:
        import sys, torch, holdfast
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.Checkpointer(sys.argv[1], model=model, optimizer=optimizer) as checkpointer:
            checkpointer.resume()
            for _ in range(3):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                checkpointer.step()
    """)
    run = str(tmp_path / "run")
    done = [run_python(script, run, env=environment_of(), timeout=60) for _ in range(2)]
    assert [each.returncode for each in done] == [0, 0]
    assert done[0].stderr == ""
    [line] = done[1].stderr.splitlines()
    assert line.startswith(
        f"holdfast: {run} continues after step 3: the base of step 0 loaded and 3 records replayed"
    )
    assert line.endswith("No later step is known.")


def logged(tmp_path, count, part_bytes):
    """The path of a log of ``count`` steps in parts of ``part_bytes``."""
    log = EventLog(tmp_path / "events.jsonl", part_bytes)
    for step in range(1, count + 1):
        log.emit("step", step=step, durable_step=step - 1)
    log.close()
    return log.path


def steps_in(path):
    return [event["step"] for event in read_events(path)]


def test_log_that_has_grown_becomes_a_part_and_is_read_first(tmp_path):
    path = logged(tmp_path, 5, part_bytes=120)  # two lines a part
    assert sorted(os.listdir(tmp_path)) == ["events.000001.jsonl", "events.000002.jsonl", "events.jsonl"]
    assert steps_in(path) == [1, 2, 3, 4, 5]


def test_oldest_parts_go(tmp_path):
    path = logged(tmp_path, 21, part_bytes=120)
    assert part_numbers(path) == [8, 9, 10]
    assert steps_in(path) == list(range(15, 22))


def test_two_writers_of_one_log_lose_nothing_when_it_is_renamed(tmp_path):
    one, other = (EventLog(tmp_path / "events.jsonl", 150) for _ in range(2))
    for step in range(1, 7):
        (one if step % 2 else other).emit("step", step=step)
    assert steps_in(one.path) == [1, 2, 3, 4, 5, 6]
    parts = [part_path(one.path, number) for number in part_numbers(one.path)]
    assert [part.read_bytes().count(b"\n") for part in parts] == [3, 3]  # neither wrote on in a part


def test_log_that_was_moved_with_its_directory_is_written_there(tmp_path):
    (tmp_path / "run").mkdir()
    log = EventLog(tmp_path / "run" / "events.jsonl")
    log.emit("step", step=1)
    (tmp_path / "run").rename(tmp_path / "moved")
    log.emit("step", step=2)
    assert steps_in(tmp_path / "moved" / "events.jsonl") == [1, 2]
    assert not (tmp_path / "run").exists()


def test_lost_steps_are_found_in_the_part_before(tmp_path):
    path = logged(tmp_path, 6, part_bytes=120)
    assert path.stat().st_size == 0
    assert describe_lost_steps(path, 5).startswith("Lost: step 6 was done and not durable")


def test_parts_fit_into_the_storage_of_the_run(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.fit_into(None)
    assert log.part_bytes == 64 << 20
    log.fit_into(64 << 20)
    assert log.part_bytes == 1 << 20
    log.fit_into(1)
    assert log.part_bytes == 64 << 10
