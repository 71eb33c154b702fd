"""What an engine tells its log: what it is, what a step is to move, and when the operations of some steps ran."""

import sys

import pytest

import holdfast
from holdfast.events import EventLog, read_events
from holdfast.offload.step_reports import TIMED_EVERY
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder


def offload(root, **options):
    model = decoder(blocks=3)
    return holdfast.offload(model, adamw(model), root, **grouped(dtype="fp32", **options))


def events_of(root, name):
    return [event for event in read_events(root / "events.jsonl") if event["event"] == name]


def keys_of(event, step):
    """The operations of ``step`` in a timeline, as a list names them."""
    kinds = event["kinds"]
    return sorted(
        (kinds[kind], block, m, phase)
        for _, kind, _, _, of, phase, block, m, _ in event["spans"]
        if of == step
    )


@pytest.mark.slow
def test_the_first_and_the_third_step_are_recorded_whole(tmp_path):
    options = {"write_limit": 300_000, "recomputed_fraction": 1.0}
    with offload(tmp_path, **options) as engine:  # writes of a step go on beside the next
        for number in range(5):
            engine.step(batches(number, 2))
        [listed] = engine.operations.values()
    found = events_of(tmp_path, "timeline")
    assert [(event["step"], event["of_sitting"]) for event in found] == [(1, 1), (3, 3)]
    for event in found:
        assert keys_of(event, event["step"]) == sorted(op.key[:4] for op in listed)
        assert sum(row[8] for row in event["spans"] if row[4] == event["step"]) == sum(
            op.nbytes for op in listed
        )
        assert all(start <= end for _, _, start, end, *_ in event["spans"])
        computed = [
            row for row in event["spans"] if event["lanes"][row[0]] == "compute" and row[4] == event["step"]
        ]
        assert all(0 <= start <= end <= event["seconds"] for _, _, start, end, *_ in computed)
    assert keys_of(found[1], 2)  # what the second left to be done beside the third


def test_the_only_step_of_a_sitting_is_recorded_when_it_is_closed(tmp_path):
    with offload(tmp_path) as engine:
        engine.step(batches(0, 1))
    [event] = events_of(tmp_path, "timeline")
    assert ("commit", -1, -1, "") in keys_of(event, 1)
    assert [e["event"] for e in read_events(tmp_path / "events.jsonl")][-2:] == ["timeline", "closed"]


def test_of_a_long_run_every_thousandth_step_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["holdfast.offload.step_reports"], "TIMED_EVERY", 5)
    with offload(tmp_path) as engine:
        for number in range(11):
            engine.step(batches(number, 1))
    assert TIMED_EVERY == 1000
    assert [event["step"] for event in events_of(tmp_path, "timeline")] == [1, 3, 5, 10]


def test_nothing_is_recorded_where_nobody_keeps_it(tmp_path, monkeypatch):
    seen = []
    with offload(tmp_path, events=EventLog(None)) as engine:
        for number in range(4):
            handle = engine._run.model.head.register_forward_hook(
                lambda *_: seen.append(engine._executor.spans)
            )
            engine.step(batches(number, 1))
            handle.remove()
    assert seen == [None] * 4
    assert not (tmp_path / "events.jsonl").exists()


def test_a_trace_that_somebody_takes_is_left_to_him(tmp_path):
    with offload(tmp_path) as engine:
        engine.trace(spans := [])
        for number in range(4):
            engine.step(batches(number, 1))
        engine.trace(None)
    assert {span.step for span in spans} == {0, 1, 2, 3}
    assert events_of(tmp_path, "timeline") == []


def test_what_comes_between_steps_is_neither_in_a_timeline_nor_in_what_steps_moved(tmp_path):
    events = EventLog(tmp_path / "events.jsonl")
    with offload(tmp_path, events=events, recomputed_fraction=1.0) as engine:
        for number in range(4):
            engine.step(batches(number, 2))
            engine.wait()
            engine.evaluate(batches(9, 3))
            engine.state_dict()
    [moves] = [event["moves"] for event in events_of(tmp_path, "schedule")]
    steps = events_of(tmp_path, "step")
    for event in steps[1:]:
        assert event["moved"]["ssd_read"] == moves["ssd_read"]
        assert event["moved"]["upload"]["upload_params"] == moves["upload"]["upload_params"]
    kinds = {kind for event in events_of(tmp_path, "timeline") for kind in event["kinds"]}
    assert "evaluate" not in kinds and all(
        row[4] > 0 for e in events_of(tmp_path, "timeline") for row in e["spans"]
    )


def test_what_steps_moved_adds_up_to_what_moved_since_the_run_was_opened(tmp_path):
    options = {"clip_norm": 1.0, "activations_on_host": 0.0}
    with offload(tmp_path, **options) as engine:
        engine.step(batches(0, 1))
    with offload(tmp_path, **options) as engine:
        setup = engine.traffic()
        assert setup["ssd_read", "state"] > 0
        for number in range(4):
            engine.step(batches(number, 2))
        engine.wait()
        engine.step(batches(4, 2))
        moved = {key: n - setup.get(key, 0) for key, n in engine.traffic().items()}
    steps = events_of(tmp_path, "step")[1:]
    reads = sum(n for (lane, _), n in moved.items() if lane == "ssd_read")
    assert sum(event["read_bytes"] for event in steps) == reads
    written = sum(events_of(tmp_path, "closed")[-1]["moved"]["ssd_write"].values())
    assert written >= sum(event["written_bytes"] for event in steps)


def test_each_shape_of_steps_is_told_once(tmp_path):
    with offload(tmp_path, commit_every=2, recomputed_fraction=1.0) as engine:
        for number, count in enumerate((1, 1, 1, 2)):
            engine.step(batches(number, count))
    told = [(event["micro_batches"], event["commit"]) for event in events_of(tmp_path, "schedule")]
    assert told == [(1, False), (1, True), (2, True)]


@pytest.mark.parametrize("sample", [None, batches(0, 1)[0]])
def test_the_beginning_says_what_the_run_is_to_take(tmp_path, sample):
    with offload(tmp_path, sample=sample) as engine:
        engine.step(batches(0, 1))
        preflight = engine.preflight
    with offload(tmp_path):
        pass
    first, second = events_of(tmp_path, "engine")
    assert (first["first_step"], second["first_step"]) == (0, 1)
    assert (first["blocks"], first["state_bytes"]) == (3, preflight.state_bytes)
    assert first["host_bytes_predicted"] == preflight.host_bytes_predicted
    if sample is not None:
        assert (
            sum(first["memory_predicted"]["host"].values()) + first["process_bytes"]
            == preflight.host_bytes_predicted
        )


def test_the_log_goes_where_it_is_told_and_does_not_enter_the_run(tmp_path):
    with offload(tmp_path / "run", events=EventLog(tmp_path / "log.jsonl")) as engine:
        engine.step(batches(0, 1))
    assert not (tmp_path / "run" / "events.jsonl").exists()
    assert next(read_events(tmp_path / "log.jsonl"))["event"] == "engine"
    with offload(tmp_path / "other"):
        pass
    assert LocalStore.read(tmp_path / "other").head().step == 0
