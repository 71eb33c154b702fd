"""The event log: every line is whole JSON, whatever happened to the process before it."""

import json

import numpy as np
import pytest

from holdfast.events import EventLog, read_events


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
