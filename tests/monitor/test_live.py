"""The panel of a run that another process trains: every number, in 80 columns, from a log that grows."""

import io
import json
import os

import pytest
from rich.console import Console

import logged
from holdfast.events import EventLog
from holdfast.monitor.history import History
from holdfast.monitor.run_panel import LivePanel, Tail

NOW = logged.BEGAN + 65


def drawn(log, width=80, now=NOW):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(LivePanel(History(log), "runs/a").picture(now))
    return out.getvalue()


def test_an_engine_is_shown_with_its_lanes_memory_and_durability():
    run = {"event": "run", "config": {"train.steps": 12}, "pid": 1, "first_step": 0}
    said = drawn([run, *logged.engine_log()[:-1]])
    for part in (
        "runs/a  step 6 of 12", "50%, 1 min 0 s left", "loss      4.400", "10 s a step", "200 tokens/s", "computing",
        "80%", "SSD reads", "25%", "512.0 MiB of 4.0 GiB", "optimizer state", "durable   step 5", "1 step behind",
        "written   17.6 KiB", "of an SSD's life", "Step 3: The busiest is computing", "training",
    ):  # fmt: skip
        assert part in said, (part, said)


def test_a_checkpointer_is_shown_with_what_keeping_steps_costs():
    said = drawn(logged.checkpointer_log())
    for part in (
        "step 30",
        "100 ms a step",
        "keeping   10.0% of the time",
        "ring 800 B",
        "3 steps behind",
        "0 MB/s",
    ):
        assert part in said, (part, said)


CHOSEN = {
    "event": "every",
    "time": logged.BEGAN,
    "step": 9,
    "was": 1,
    "every": 40,
    "why": "a base every 40 steps.",
}


@pytest.mark.parametrize("every, said", [(1, "a record of every step"), (40, "a base every 40 steps")])
def test_what_every_auto_has_chosen_is_shown(every, said):
    log = [*logged.checkpointer_log(), CHOSEN | {"every": every}]
    assert said in drawn(log) and said not in drawn(log[:-1])
    assert LivePanel(History(log), "runs/a").document(NOW)["every"] == every


@pytest.mark.parametrize("log", [[], [logged.engine()], logged.engine_log(), logged.checkpointer_log()])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_keeps_to_the_width(log, width):
    assert {len(line) for line in drawn(log, width).splitlines()} == {width}


def test_in_a_narrow_terminal_the_numbers_are_whole():
    said = drawn(logged.engine_log(), 45)
    for part in ("4.400", "10 s a step", "512.0 MiB of 4.0 GiB", "step 6"):
        assert part in said, (part, said)


def test_before_the_first_step_it_says_that_there_is_none():
    assert "no step yet" in drawn([]) and "nothing was logged yet" in drawn([])


def test_silence_and_the_end_are_said():
    log = logged.engine_log()
    assert "silent for 16 min 40 s: it has died, or hangs" in drawn(log[:-1], now=logged.BEGAN + 60 + 1000)
    assert "closed" in drawn(log)
    gone = [logged.engine(pid=2**22 + 1, host=os.uname().nodename), logged.step(1)]
    assert "died: its process is gone, and it was not closed" in drawn(gone, now=logged.BEGAN + 11)


def test_a_line_says_the_same_where_there_is_no_terminal():
    panel = LivePanel(History(logged.engine_log()), "runs/a")
    assert panel.line(NOW) == "step 6  loss 4.400  10 s a step  200 tokens/s  write 0 MB/s  durable 6  closed"
    assert LivePanel(History([]), "runs/a").line(NOW) == "runs/a: nothing was logged yet"


def test_the_document_is_plain_data():
    found = LivePanel(History(logged.engine_log()), "runs/a").document(NOW)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["step"], found["durable_step"], found["moved"]) == (6, 6, logged.MOVES)
    assert found["lanes"]["busy_seconds"]["ssd_read"] == 2.5


def steps_of(tail):
    return [event["step"] for event in tail.new()]


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert steps_of(tail) == []
    line = json.dumps(logged.step(1)) + "\n"
    with open(path, "w") as file:
        for text in (line, line[:20]):
            file.write(text)
            file.flush()
        assert steps_of(tail) == [1]
        assert steps_of(tail) == []
        file.write(line[20:] + "not JSON\n7\n" + json.dumps(logged.step(2)) + "\n")
        file.flush()
        assert steps_of(tail) == [1, 2]


def test_a_log_that_was_replaced_or_cut_is_read_anew(tmp_path):
    path = logged.write(tmp_path / "events.jsonl", [logged.step(1), logged.step(2)])
    tail = Tail(path)
    assert steps_of(tail) == [1, 2]
    logged.write(tmp_path / "other.jsonl", [logged.step(7), logged.step(8), logged.step(9)]).rename(path)
    assert steps_of(tail) == [7, 8, 9]
    path.write_text(json.dumps(logged.step(5)) + "\n")
    assert steps_of(tail) == [5]


def test_a_tail_follows_a_log_that_becomes_a_part(tmp_path):
    path = tmp_path / "events.jsonl"
    log, tail, seen = EventLog(path, part_bytes=150), Tail(path), []
    for step in range(1, 11):
        log.emit("step", step=step)
        if step % 3 == 0:
            seen += steps_of(tail)
    assert seen == list(range(1, 10))
    assert steps_of(tail) == [10]
    for part in tmp_path.glob("events.0*"):
        part.unlink()
    log.emit("step", step=11)
    assert steps_of(tail) == [11]


def test_the_planned_time_stands_beside_the_measured():
    first, *others = logged.engine_log()
    plan = {"event": "plan", "time": logged.BEGAN, "step_seconds": 5.0}
    panel = LivePanel(History([first, plan, *others]), "run")
    assert panel.document(logged.BEGAN + 65)["predicted_seconds"] == 5.0
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel.picture(logged.BEGAN + 65))
    assert "planned 5 s" in console.export_text()


def test_the_speed_of_light_is_shown():
    plan = {
        "event": "plan", "step_seconds": 5.0, "micro_batches": 2, "busiest": "compute",
        "busy_seconds": {"compute": 4.0},
    }  # fmt: skip
    first, *others = logged.engine_log()
    said = " ".join(drawn([first, plan, *others]).split())
    assert "40% of the speed of light (computing)" in said
    assert "speed of light" not in drawn(logged.engine_log())
