"""Timelines show when each lane works, in text and as a trace."""

import json

import pytest

from holdfast.schedule import operations
from holdfast.schedule.operations import Key, Op
from holdfast.schedule.planner.machine_rates import Machine
from holdfast.schedule.simulate import busy_columns, chrome_trace, simulate, text_timeline, window

READS = [
    Op(Key("read"), operations.SSD_READ, nbytes=2),
    Op(Key("forward", 0, 1), operations.COMPUTE, work=6.0, needs=(Key("read"),)),
]
UNIT = Machine(ssd_read_bytes_per_second=1, compute_flop_per_second=1)


def test_a_column_is_as_dark_as_its_lane_is_busy():
    found = simulate([READS], UNIT)
    assert window(found) == (0.0, 8.0)
    busy = busy_columns(found, 4)
    assert busy == {"compute": [0.0, 1.0, 1.0, 1.0], "ssd_read": [1.0, 0.0, 0.0, 0.0]}
    assert text_timeline(found, 4) == ["compute  | ###|", "ssd_read |#   |"]
    assert busy_columns(found, 3)["ssd_read"] == pytest.approx([0.75, 0.0, 0.0])


def test_the_window_is_one_step_of_many_and_shows_what_other_steps_do_meanwhile():
    write = Op(Key("write"), operations.SSD_WRITE, nbytes=4, needs=(Key("forward", 0, 1),))
    machine = Machine(ssd_read_bytes_per_second=1, ssd_write_bytes_per_second=1, compute_flop_per_second=1)
    found = simulate([[*READS, write]] * 3, machine)
    assert window(found) == (16.0, 24.0)
    assert busy_columns(found, 8)["ssd_write"] == [1, 1, 1, 1, 0, 0, 0, 0]  # of the step before


def test_a_trace_has_every_operation_on_the_thread_of_its_lane():
    trace = json.loads(
        json.dumps(chrome_trace({"one": simulate([READS] * 2, UNIT), "other": simulate([READS], UNIT)}))
    )
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert len(spans) == 6
    second = next(
        e for e in spans if e["pid"] == 0 and e["args"]["step"] == 1 and e["name"].startswith("forward")
    )
    assert second["name"] == "forward block 0 micro-batch 1"
    assert names[0, second["tid"]] == "compute"
    assert (second["ts"], second["dur"]) == (10e6, 6e6)
    assert second["args"]["work"] == 6.0


def test_nothing_is_drawn_of_steps_that_take_no_time():
    assert text_timeline(simulate([READS], Machine())) == []
