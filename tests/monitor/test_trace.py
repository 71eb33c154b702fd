"""The trace: the fields that Perfetto and chrome://tracing read, and slices that nest."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

import logged
from holdfast.monitor.history import History
from holdfast.monitor.trace import chrome_trace

NUMBER = (int, float)
NEEDS = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "cat": str, "ts": NUMBER, "s": str, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "ts": NUMBER, "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}  # fmt: skip
"""By kind of event, as the Trace Event Format has them."""


def check_trace(document):
    """What every trace must be."""
    text = json.dumps(document, allow_nan=False)
    events = json.loads(text)["traceEvents"]
    named, slices = defaultdict(set), defaultdict(list)
    for event in events:
        for field, kind in NEEDS[event["ph"]].items():
            assert isinstance(event[field], kind), (field, event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert slices.keys() <= named["thread_name"]
    assert {pid for pid, _ in slices} <= {pid for pid, _ in named["process_name"]}
    for found in slices.values():
        found.sort()
        assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(found)), "slices of a thread overlap"
    return events


@pytest.mark.parametrize("log", [logged.engine_log(), logged.checkpointer_log(), []])
def test_a_trace_has_the_fields_that_viewers_need(log):
    events = check_trace(chrome_trace(History(log), "runs/a"))
    assert {event["ph"] for event in events} >= ({"M", "X", "C"} if log else {"M"})


def test_operations_are_where_they_ran_on_the_clock_of_the_run():
    events = check_trace(chrome_trace(History(logged.engine_log()), "runs/a"))
    [read] = [event for event in events if event.get("cat") == "ssd_read"]
    assert (read["name"], read["args"]) == ("load params, backward, block 0", {"step": 3, "bytes": 1000})
    assert (read["ts"], read["dur"]) == (23e6, 2.5e6)  # the run's first step began at 0, this one at 20 s
    [third] = [event for event in events if event["name"] == "step 3"]
    assert (third["ts"], third["dur"]) == (20e6, 10e6)


def test_operations_of_one_lane_that_overlap_are_in_rows_of_their_own():
    both = [logged.span("ssd_write", "update", at, at + 4.0, 3) for at in (0.0, 1.0, 4.5)]
    log = [*logged.engine_log()[:-1], logged.timeline(spans=both)]
    events = check_trace(chrome_trace(History(log), "runs/a"))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names[-2:] == ["SSD writes 1", "SSD writes 2"]


def test_steps_that_were_logged_together_are_one_slice():
    events = check_trace(chrome_trace(History(logged.checkpointer_log()), "runs/a"))
    slices = [(event["name"], event["dur"]) for event in events if event["ph"] == "X"]
    assert slices == [("steps 1 to 10", 1e6), ("steps 11 to 20", 1e6), ("steps 21 to 30", 1e6)]
    [base] = [event for event in events if event["ph"] == "i"]
    assert (base["name"], base["args"]) == ("base", {"step": 20, "durable_step": 22})


@pytest.mark.slow
def test_steps_whose_ends_were_logged_late_do_not_overlap():
    steps = [logged.step(1), logged.step(2, seconds=10.5), logged.step(3)]
    check_trace(chrome_trace(History([logged.engine(), *steps]), "runs/a"))
