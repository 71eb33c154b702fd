"""What a Checkpointer tells its log of steps: a line a second at most, in which nothing is lost."""

import gc
import weakref

import pytest
import torch

import holdfast
from holdfast.checkpoint.replica import replica_process
from holdfast.events import EventLog, StepLog, read_events
from replica_run import Forked


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def steps_of(path):
    return [event for event in read_events(path) if event["event"] == "step"]


def test_steps_of_one_second_are_one_line_with_their_means(tmp_path):
    clock, written = Clock(), [0]
    pulse = StepLog(EventLog(tmp_path / "log"), clock)
    for step in range(1, 27):
        written.append(10 * step)
        pulse.stepped(
            step, 0.125, 0.01 * (step % 2), lambda: {"durable_step": 3, "written_bytes": written[-1]}
        )
        clock.now += 0.125
    pulse.end(26, lambda: {"durable_step": 26, "written_bytes": written[-1] + 7})
    found = steps_of(tmp_path / "log")
    assert [(event["step"], event["steps"], event["written_bytes"]) for event in found] == [
        (1, 1, 10), (9, 8, 80), (17, 8, 80), (25, 8, 80), (26, 1, 17),
    ]  # fmt: skip
    assert found[1]["seconds"] == 0.125
    assert found[1]["stall_seconds"] == pytest.approx(0.04 / 8)
    assert found[1]["longest_stall_seconds"] == 0.01
    *_, closed = read_events(tmp_path / "log")
    assert (closed["event"], closed["durable_step"], closed["written_bytes"]) == ("closed", 26, 267)


def test_long_steps_have_a_line_each(tmp_path):
    clock = Clock()
    pulse = StepLog(EventLog(tmp_path / "log"), clock)
    for step in (1, 2, 3):
        pulse.stepped(step, 5.0, 0.0, lambda: {"durable_step": 0})
        clock.now += 5.0
    assert [event["steps"] for event in steps_of(tmp_path / "log")] == [1, 1, 1]


def test_where_nobody_keeps_a_log_nothing_is_asked():
    def asked():
        raise AssertionError("nobody reads this")

    pulse = StepLog(EventLog(None))
    pulse.stepped(1, 1.0, 0.0, asked)
    pulse.end(1, asked)


def train(root, steps, **options):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(root, model=model, optimizer=optimizer, **options) as kept:
        kept.resume()
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            kept.step()
    return weakref.ref(kept)


def test_a_run_tells_every_step_and_all_that_it_wrote(tmp_path):
    gone = train(tmp_path, 5)
    found = list(read_events(tmp_path / "events.jsonl"))
    begun = [event for event in found if event["event"] == "checkpointer"]
    assert [(event["first_step"], event["ranks"], event["codec"], event["replica"]) for event in begun] == [
        (0, 1, "Exact", False)
    ]
    assert sum(event["steps"] for event in steps_of(tmp_path / "events.jsonl")) == 5
    assert (found[-1]["event"], found[-1]["step"], found[-1]["durable_step"]) == ("closed", 5, 5)
    written = sum(event["written_bytes"] for event in steps_of(tmp_path / "events.jsonl"))
    assert written == found[-1]["written_bytes"] > 0
    gc.collect()
    assert gone() is None
    train(tmp_path, 2)
    assert [
        e["first_step"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "checkpointer"
    ] == [0, 5]


@pytest.mark.slow
def test_a_run_beside_a_replica_tells_where_that_is(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_process, "start_process", Forked)
    train(tmp_path, 3, replica=True)
    *_, last = steps_of(tmp_path / "events.jsonl")
    assert (last["step"], last["replica_step"]) == (3, 3)
    assert "written_bytes" not in last
