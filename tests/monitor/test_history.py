"""The history of a run: sittings, steps that were made twice, what was written, and lines of any other form."""

import pytest

import logged
from holdfast.monitor import facts
from holdfast.monitor.facts import Drive
from holdfast.monitor.history import History


def test_steps_made_again_count_once_in_the_line_and_twice_in_what_was_written():
    first = [logged.engine(), logged.schedule(), *(logged.step(n, loss=1.0) for n in (1, 2, 3))]
    again = [logged.engine(first_step=2), logged.schedule(), *(logged.step(n, loss=2.0) for n in (3, 4))]
    history = History([*first, *again])
    assert [(step.step, step.loss) for step in history.line()] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert history.num_steps == 5
    assert history.written_bytes == 5 * 3000
    assert [sitting.closed for sitting in history.sittings] == [None, None]


def test_a_resume_from_an_earlier_step_takes_the_steps_after_it_away():
    history = History([logged.engine(), *(logged.step(n) for n in (1, 2, 3)), logged.engine(first_step=1)])
    assert [step.step for step in history.line()] == [1]


def test_a_rollback_takes_the_steps_after_it_away():
    back = {"event": "rollback", "step": 1, "from_step": 3, "time": 4.0}
    history = History([logged.engine(), *(logged.step(n) for n in (1, 2, 3)), back])
    assert [step.step for step in history.line()] == [1]
    history.add(logged.step(2, loss=5.0))
    assert [(step.step, step.loss) for step in history.line()][1:] == [(2, 5.0)]
    assert history.num_steps == 4


def test_what_a_sitting_wrote_is_what_its_end_says():
    assert History(logged.engine_log()).written_bytes == 50_000
    assert History(logged.checkpointer_log()).written_bytes == 3 * 7000
    closed = {"event": "closed", "step": 30, "durable_step": 30, "written_bytes": 25_000}
    assert History([*logged.checkpointer_log(), closed]).written_bytes == 25_000
    assert History([logged.engine()]).written_bytes is None


@pytest.mark.parametrize(
    "odd",
    [
        {}, {"event": "step"}, {"event": "step", "step": "x", "time": 0, "seconds": 1, "durable_step": 0},
        logged.step(1, seconds="long"), logged.step(1, steps=0), {"event": "timeline", "spans": 3},
        logged.timeline(spans=[[9] * 9]), {"event": "schedule"}, {"event": ["step"]},
        {"event": "engine", "blocks": 3}, logged.step(2, moved=7),
    ],
)  # fmt: skip
def test_what_is_of_no_known_form_is_counted_and_passed_over(odd):
    history = History([logged.engine(), logged.step(1), odd, logged.step(2)])
    assert history.num_unreadable == 1
    assert [step.step for step in history.line()] == [1, 2]


def test_the_newest_recorded_step_that_is_no_first_one_is_shown():
    first, third, first_again = (logged.timeline(step=n, of_sitting=of) for n, of in ((1, 1), (3, 3), (4, 1)))
    assert History([logged.engine(), first, third, logged.engine(3), first_again]).timeline.step == 3
    assert History([logged.engine(), first]).timeline.step == 1
    assert History([logged.engine()]).timeline is None


def test_traffic_is_the_mean_of_the_steps_after_the_first_against_the_schedules_of_their_shapes():
    first = logged.step(1, moved={"ssd_read": {"load_params": 1}})
    other = logged.step(3, micro_batches=3, moved={"ssd_read": {"load_params": 2500}})
    wider = logged.schedule() | {"micro_batches": 3, "moves": {"ssd_read": {"load_params": 2000}}}
    found = facts.traffic(
        History([logged.engine(), logged.schedule(), wider, first, logged.step(2), other, logged.step(4)])
    )
    assert (found["steps"], found["micro_batches"]) == (3, 2)
    assert found["rows"] == [
        {"lane": "ssd_read", "kind": "load_params", "expected": 4000 / 3, "moved": 4500 / 3},
        {"lane": "ssd_write", "kind": "store_state", "expected": 2000.0, "moved": 2000.0},
    ]


def test_traffic_of_one_step_alone_or_without_a_schedule_is_not_known():
    assert facts.traffic(History([logged.engine(), logged.schedule(), logged.step(1)])) is None
    assert facts.traffic(History([logged.engine(), logged.step(1), logged.step(2)])) is None


def test_times_weigh_steps_that_were_logged_together():
    lines = [
        {
            "event": "step",
            "time": 0,
            "step": 1,
            "steps": 1,
            "seconds": 4.0,
            "durable_step": 0,
            "stall_seconds": 1.0,
        },
        {
            "event": "step",
            "time": 0,
            "step": 4,
            "steps": 3,
            "seconds": 2.0,
            "durable_step": 0,
            "stall_seconds": 0.0,
        },
    ]
    found = facts.times(History(lines).line())
    assert (found["steps"], found["mean_seconds"], found["stall_share"]) == (4, 2.5, 0.1)
    assert found["tokens_per_second"] is None


def test_memory_sets_what_was_measured_beside_what_was_predicted():
    found = facts.memory(History(logged.engine_log()))
    assert (found["host_bytes"], found["host_budget"], found["host_predicted"]) == (2**29, 4 * 2**30, 2**30)
    assert found["classes"] == [
        {"class": "optimizer state", "predicted": 6000, "measured": 4096},
        {"class": "workspace", "predicted": 700, "measured": None},
    ]


def test_predictions_are_only_of_what_was_measured_too():
    log = [
        *logged.engine_log(),
        {
            "event": "recovered",
            "step": 6,
            "predicted_seconds": 2.0,
            "load_seconds": 1.0,
            "replay_seconds": 2.0,
        },
    ]
    rows = {row["what"]: (row["predicted"], row["measured"]) for row in facts.predictions(History(log), 8.0)}
    assert rows == {
        "time of a step, median": (8.0, 10.0),
        "host memory of the process, at most": (2**30, 2**29),
        "read from the SSD in a step": (1000.0, 1000.0),
        "written to the SSD in a step": (3000.0, 3000.0),
        "recovery of step 6": (2.0, 3.0),
    }
    assert facts.predictions(History(logged.checkpointer_log()), None) == []


def test_the_life_of_an_ssd_is_counted_in_steps():
    found = facts.life(History(logged.engine_log(steps=5)), Drive("sda", 1, 2))
    assert (found["bytes_per_step"], found["steps_of_a_life"]) == (10_000, 600 * 10**12 / 10_000)
    assert found["drive"] == {"name": "sda", "read_bytes": 1, "written_bytes": 2}
    assert facts.life(History([]), None)["rated_share"] is None


def test_the_state_is_what_the_log_and_the_machine_say():
    now = logged.BEGAN + 65
    open_ = logged.engine_log()[:-1]
    assert facts.state_of(History([]), now) == "nothing was logged yet"
    assert facts.state_of(History(open_), now) == "training"
    assert facts.state_of(History(open_), now + 80) == "training"  # ten steps of 10 s have not gone by
    assert facts.state_of(History(open_), now + 200) == "silent"
    assert facts.state_of(History(logged.engine_log()), now) == "closed"
    for said in ("finished", "stopped", "failed"):
        told = {"event": said, "time": logged.BEGAN + 90, "step": 6}
        assert facts.state_of(History([*open_, told, logged.engine_log()[-1]]), now) == said


def test_a_process_of_this_machine_that_is_gone_has_died(monkeypatch):
    import os

    here = logged.engine(pid=os.getpid(), host=os.uname().nodename)
    assert facts.state_of(History([here, logged.step(1)]), logged.BEGAN + 11) == "training"
    gone = logged.engine(pid=2**22 + 1, host=os.uname().nodename)  # more than Linux gives out
    assert facts.state_of(History([gone, logged.step(1)]), logged.BEGAN + 11) == "died"


def test_events_of_others_are_passed_over():
    history = History([logged.engine(), {"event": "mine", "anything": {}}, logged.step(1)])
    assert (history.num_unreadable, len(history.line()), history.other_events) == (0, 1, [])


def test_a_history_that_grows_has_the_line_of_what_it_has_by_then():
    history = History([logged.engine(), logged.step(1)])
    assert len(history.line()) == 1
    history.add(logged.step(2))
    assert [step.step for step in history.line()] == [1, 2]
