"""The executor runs lists of operations as their dependencies allow, and after a failure nothing new."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

import holdfast
from holdfast.errors import EngineFailed
from holdfast.offload.executor import Executor, together
from holdfast.offload.ops import KINDS as HANDLERS
from holdfast.schedule.operations import (
    COMMIT,
    COMPUTE,
    DOWNLOAD,
    EXCHANGE,
    SSD_READ,
    SSD_WRITE,
    UPDATE,
    UPLOAD,
    Key,
    Op,
)
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder, differing, stored


class Trouble(Exception):
    pass


def op(name, lane=COMPUTE, needs=(), needs_previous=()):
    return Op(Key(name), lane, needs=tuple(map(Key, needs)), needs_previous=tuple(map(Key, needs_previous)))


class Log:
    """Handlers that note when and where they run. ``hold`` makes one of them wait until it is let go, ``fail``
    makes it raise; ``later`` makes it return a future."""

    def __init__(self):
        self.events, self.threads = [], {}
        self.holds: dict[str, threading.Event] = {}
        self.errors: dict[str, BaseException] = {}
        self.futures: dict[str, Future] = {}

    def __getitem__(self, name):
        return lambda op, step: self.run(name, step)

    def run(self, name, step):
        self.threads[name] = threading.current_thread().name
        self.events.append(f"{name} begins")
        if name in self.holds:
            assert self.holds[name].wait(10)
        if name in self.errors:
            raise self.errors[name]
        self.events.append(f"{name} ends")
        return self.futures.get(name)

    def hold(self, name):
        self.holds[name] = threading.Event()
        return self.holds[name].set

    def wait_for(self, event):
        deadline = time.monotonic() + 10
        while event not in self.events:
            assert time.monotonic() < deadline, f"{event} never came: {self.events}"
            time.sleep(0.001)


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def executor(log):
    made = Executor(log, update_workers=2, prepare_worker=lambda: None)
    yield made
    for event in log.holds.values():
        event.set()
    made.abort()
    made.close()
    made.close()


STEP = object()


def test_computations_run_in_order_on_the_callers_thread(executor, log):
    executor.run([op("a"), op("b"), op("c", needs=["a"])], STEP)
    assert [event for event in log.events if event.endswith("ends")] == ["a ends", "b ends", "c ends"]
    assert set(log.threads.values()) == {threading.current_thread().name}


def test_a_computation_waits_for_what_it_needs(executor, log):
    let_go = log.hold("read")
    threading.Timer(0.05, let_go).start()
    executor.run([op("read", UPDATE), op("compute", needs=["read"])], STEP)
    assert log.events.index("read ends") < log.events.index("compute begins")


def test_run_returns_when_the_last_computation_is_over(executor, log):
    let_go = log.hold("update")
    executor.run(
        [op("compute"), op("update", UPDATE, needs=["compute"]), op("commit", COMMIT, ["update"])], STEP
    )
    assert "update ends" not in log.events
    let_go()
    executor.drain()
    assert log.events[-1] == "commit ends"


def test_the_next_step_waits_for_exactly_what_it_needs(executor, log):
    let_go = log.hold("update")
    first = [op("a"), op("update", UPDATE, needs=["a"]), op("commit", COMMIT, needs=["update"])]
    executor.run(first, STEP)
    second = [op("b", needs_previous=["a"]), op("c", needs_previous=["update", "never there"])]
    runner = threading.Thread(target=executor.run, args=(second, object()))
    runner.start()
    log.wait_for("b ends")
    assert "c begins" not in log.events
    let_go()
    runner.join()
    executor.drain()
    assert "c ends" in log.events


def test_another_list_waits_for_downloads_of_the_one_before_and_the_same_list_does_not(executor, log):
    first, other = [op("a"), op("download", DOWNLOAD, needs=["a"])], [op("b")]
    log.futures["download"] = Future()
    executor.run(first, STEP)
    runner = threading.Thread(target=executor.run, args=(other, object()))
    runner.start()
    time.sleep(0.02)
    assert "b begins" not in log.events
    log.futures["download"].set_result(None)
    runner.join()
    log.futures["download"] = Future()
    executor.run(first, object())
    executor.run(first, object())
    assert log.events.count("a ends") == 3
    executor.run([*first, op("commit", COMMIT)], object())  # the same on the device
    assert log.events.count("a ends") == 4
    log.futures["download"].set_result(None)
    executor.drain()


def test_what_an_earlier_step_had_counts_until_a_later_one_has_it(executor, log):
    let_go = log.hold("update")
    executor.run([op("update", UPDATE)], STEP)
    executor.run([op("something else")], object())
    runner = threading.Thread(target=executor.run, args=([op("c", needs_previous=["update"])], object()))
    runner.start()
    time.sleep(0.02)
    assert "c begins" not in log.events
    let_go()
    runner.join()


@pytest.mark.parametrize("lane, at_once", [(UPDATE, 2), (COMMIT, 1)])
def test_a_lane_has_its_own_threads(executor, log, lane, at_once):
    names = [f"op {index}" for index in range(4)]
    for name in names:
        log.hold(name)
    executor.run([*(op(name, lane) for name in names), op("compute")], STEP)
    log.wait_for(f"op {at_once - 1} begins")
    time.sleep(0.02)
    assert sum(event.startswith("op") for event in log.events) == at_once
    assert all(log.threads[f"op {index}"].startswith(f"holdfast-{lane}") for index in range(at_once))


def test_of_several_that_are_ready_the_earlier_in_the_list_goes_first(executor, log):
    let_go = log.hold("first")
    log.hold("also first")
    names = [f"op {index}" for index in range(5)]
    listed = [op("first", UPDATE), op("also first", UPDATE)]
    listed += [op(name, COMMIT, needs=["first"]) for name in names]
    executor.run([*listed, op("compute")], STEP)
    let_go()
    log.wait_for("op 4 ends")
    assert [e for e in log.events if e.startswith("op") and e.endswith("ends")] == [
        f"{n} ends" for n in names
    ]


def test_an_operation_is_over_when_its_future_is(executor, log):
    log.futures["read"] = Future()
    executor.run([op("read", SSD_READ), op("update", UPDATE, needs=["read"]), op("compute")], STEP)
    log.wait_for("read ends")
    assert "update begins" not in log.events
    log.futures["read"].set_result(None)
    log.wait_for("update ends")
    executor.drain()


def test_spans_say_when_every_operation_ran(executor, log):
    executor.spans = []
    executor.run([op("a"), op("update", UPDATE, needs=["a"])], STEP)
    executor.drain()
    assert {(span.key.kind, span.lane) for span in executor.spans} == {("a", COMPUTE), ("update", UPDATE)}
    by_name = {span.key.kind: span for span in executor.spans}
    assert by_name["a"].start <= by_name["a"].end <= by_name["update"].start <= by_name["update"].end


def test_exchanges_go_in_list_order_through_one_step_and_into_the_next(log):
    executor = Executor(log, update_workers=1, prepare_worker=lambda: None, exchanges=True)
    let_go = log.hold("slow")
    listed = [
        op("slow", UPDATE),
        op("first", EXCHANGE, needs=["slow"]),
        op("second", EXCHANGE),
        op("compute"),
    ]
    executor.run(listed, STEP)
    executor.run([op("third", EXCHANGE), op("another")], STEP)
    time.sleep(0.02)
    let_go()
    executor.drain()
    executor.close()
    begun = [event.split()[0] for event in log.events if event.endswith("begins")]
    assert [name for name in begun if name in ("first", "second", "third")] == ["first", "second", "third"]


# Failures


LANES = [COMPUTE, SSD_READ, SSD_WRITE, UPLOAD, DOWNLOAD, UPDATE, COMMIT]


@pytest.mark.parametrize("lane", LANES)
def test_a_failure_is_raised_by_run_and_nothing_that_needs_it_starts(executor, log, lane):
    log.errors["bad"] = Trouble(lane)
    listed = [op("bad", lane), op("after", UPDATE, needs=["bad"]), op("compute", needs=["bad"])]
    with pytest.raises(Trouble, match=lane):
        executor.run(listed, STEP)
    executor.abort()
    assert {"after begins", "compute begins"}.isdisjoint(log.events)


@pytest.mark.parametrize("lane", [SSD_READ, SSD_WRITE, UPDATE, COMMIT])
def test_a_future_that_fails_is_a_failure(executor, log, lane):
    log.futures["bad"] = Future()
    threading.Timer(0.02, log.futures["bad"].set_exception, [Trouble(lane)]).start()
    with pytest.raises(Trouble, match=lane):
        executor.run([op("bad", lane), op("compute", needs=["bad"])], STEP)


def test_a_failure_beside_a_computation_is_raised_after_it(executor, log):
    let_go = log.hold("compute")
    log.errors["bad"] = Trouble()
    threading.Timer(0.05, let_go).start()
    with pytest.raises(Trouble):
        executor.run([op("bad", UPDATE), op("compute"), op("another")], STEP)
    assert "compute ends" in log.events
    assert "another begins" not in log.events


def test_a_failure_after_the_last_computation_is_raised_by_drain_and_by_the_next_step(executor, log):
    log.errors["bad"] = Trouble()
    executor.run([op("compute"), op("bad", COMMIT, needs=["compute"])], STEP)
    for _ in range(2):
        with pytest.raises(Trouble):
            executor.drain()
    with pytest.raises(Trouble):
        executor.run([op("again")], object())
    assert "again begins" not in log.events


def test_what_was_queued_on_a_lane_does_not_start_after_a_failure(executor, log):
    let_go, fail = log.hold("long"), log.hold("bad")
    log.errors["bad"] = Trouble()
    listed = [op("long", COMMIT), op("queued", COMMIT), op("bad", UPDATE), op("compute", needs=["bad"])]
    watcher = threading.Thread(target=lambda: (log.wait_for("long begins"), fail()))
    watcher.start()
    with pytest.raises(Trouble):
        executor.run(listed, STEP)
    watcher.join()
    let_go()
    executor.abort()
    assert "long ends" in log.events
    assert "queued begins" not in log.events


def test_an_abort_waits_for_what_runs(executor, log):
    let_go = log.hold("long")
    executor.run([op("long", UPDATE), op("compute")], STEP)
    log.wait_for("long begins")
    threading.Timer(0.05, let_go).start()
    executor.abort()
    assert log.events[-1] == "long ends"
    with pytest.raises(RuntimeError, match="given up"):
        executor.drain()


def test_when_a_computation_fails_earlier_steps_are_finished_and_its_own_is_not(executor, log):
    let_go = log.hold("update")
    earlier = [op("a"), op("update", UPDATE, needs=["a"]), op("commit", COMMIT, needs=["update"])]
    executor.run(earlier, STEP)
    log.errors["bad"] = Trouble()
    own = [op("prefetch", SSD_READ), op("bad", needs=["prefetch"]), op("its update", UPDATE, needs=["bad"])]
    own.insert(1, op("its own", UPDATE, needs=["prefetch"], needs_previous=["commit"]))
    with pytest.raises(Trouble):
        executor.run(own, object())
    threading.Timer(0.05, let_go).start()
    executor.abort()
    assert "commit ends" in log.events
    assert {"its own begins", "its update begins"}.isdisjoint(log.events)


def test_a_key_press_does_not_wait_for_earlier_steps(executor, log):
    log.futures["write"] = Future()
    executor.run([op("a"), op("write", SSD_WRITE), op("commit", COMMIT, needs=["write"])], STEP)
    log.errors["bad"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        executor.run([op("bad")], object())
    threading.Timer(0.05, log.futures["write"].set_result, [None]).start()
    executor.abort()
    assert "commit begins" not in log.events


def test_a_safe_point_may_raise_between_computations_and_while_they_wait(executor, log):
    def press():
        raise KeyboardInterrupt

    executor.safe_point = press
    with pytest.raises(KeyboardInterrupt):
        executor.run([op("a"), op("b")], STEP)
    assert log.events == ["a begins", "a ends"]


def test_a_wait_is_broken_off_at_a_safe_point(executor, log):
    log.hold("never")
    pressed = threading.Event()

    def check():
        if pressed.is_set():
            raise KeyboardInterrupt

    executor.safe_point = check
    threading.Timer(0.05, pressed.set).start()
    with pytest.raises(KeyboardInterrupt):
        executor.run([op("never", UPDATE), op("a", needs=["never"])], STEP)


def test_nothing_together_is_done():
    """A block whose parameters have no elements has nothing to load: its first step waited for ever."""
    assert together([]).result(0) is None


def test_together_is_done_when_all_are_and_fails_with_the_first_error():
    futures = [Future() for _ in range(3)]
    joined = together(futures)
    futures[1].set_exception(Trouble("first"))
    futures[0].set_exception(Trouble("second"))
    assert not joined.done()
    futures[2].set_result(1)
    with pytest.raises(Trouble, match="first"):
        joined.result(0)
    good = [Future(), Future()]
    joined = together(good)
    for future in good:
        future.set_result(None)
    assert joined.result(0) is None


# Every kind of operation of a real run


CLIP, SPILL = {"clip_norm": 1.0}, {"activations_on_host": 0.0}
KINDS = {
    "load_params": {}, "upload_params": {}, "store_params": {}, "forward": {}, "backward": {},
    "check_losses": {}, "download_input": {}, "upload_input": {}, "store_input": SPILL, "load_input": SPILL,
    "download_input_grad": {}, "upload_input_grad": {}, "download_grads": {}, "norm": CLIP,
    "upload_grads": {"schedule": "horizontal"}, "load_state": {}, "update": {}, "store_state": {},
    "update_resident": {}, "store_resident": {}, "commit": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """By whether gradients are clipped: the state after three steps without trouble."""
    states = {}
    for clip_norm in (None, 1.0):
        directory = tmp_path_factory.mktemp("whole")
        run(directory, 3, clip_norm=clip_norm)
        states[clip_norm] = stored(directory)
    return states


def run(directory, steps, **options):
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), directory, **grouped(dtype="fp32", **options)) as engine:
        while engine.steps_done < steps:
            engine.step(batches(engine.steps_done, 2))


def failing_in_step(monkeypatch, kind, number, as_future):
    """Let the handler of ``kind`` fail in step ``number``, counted from 0."""
    original = HANDLERS[kind]

    def fail(runtime, op, step):
        if step.number != number:
            return original(runtime, op, step)
        if not as_future:
            raise Trouble(kind)
        future = Future()
        future.set_exception(Trouble(kind))
        return future

    monkeypatch.setitem(HANDLERS, kind, fail)


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_is_the_error_of_the_step_and_nothing_acknowledged_is_lost(
    tmp_path, monkeypatch, three_steps, kind
):
    model = decoder(blocks=3)
    with monkeypatch.context() as patched:
        failing_in_step(patched, kind, 1, as_future=kind.startswith(("load", "store")))
        engine = holdfast.offload(model, adamw(model), tmp_path, **grouped(dtype="fp32", **KINDS[kind]))
        acknowledged = []
        with pytest.raises(Trouble, match=kind):
            for step in range(4):
                engine.step(batches(step, 2))
                acknowledged.append(engine.durable_step)
        assert not any(t.name.startswith("holdfast") for t in threading.enumerate())
        for call in (engine.wait, engine.save, lambda: engine.step(batches(0, 1)), engine.state_dict):
            with pytest.raises(EngineFailed, match="this engine is closed; its run is whole up to step"):
                call()
        engine.close()
        engine.close()
    reader = LocalStore.read(tmp_path)
    head = reader.head()
    assert head.step == engine.durable_step >= max(acknowledged, default=0)
    assert head.step in (0, 1)
    assert reader.verify(head) == []
    assert not any("forward" in block.__dict__ for block in model.blocks)
    run(tmp_path, 3, **KINDS[kind])
    assert differing(stored(tmp_path), three_steps[KINDS[kind].get("clip_norm")]) == []


def test_every_kind_of_operation_of_a_cpu_run_is_among_those_that_were_made_to_fail(tmp_path):
    seen = set()
    for number, options in enumerate(({}, {**CLIP, **SPILL}, {"schedule": "horizontal"})):
        model = decoder(blocks=3)
        with holdfast.offload(
            model, adamw(model), tmp_path / str(number), **grouped(dtype="fp32", **options)
        ) as engine:
            engine.step(batches(0, 2))
            engine.evaluate(batches(0, 2))
            seen |= {op.key.kind for listed in engine.operations.values() for op in listed}
    assert seen - {"evaluate", "norm_block"} == set(KINDS)


def test_a_trace_says_when_every_operation_of_a_run_ran(tmp_path):
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        engine.trace(spans := [])
        engine.step(batches(0, 2))
        engine.wait()
        engine.trace(None)
        engine.step(batches(1, 2))
        listed, _ = engine.operations.values()  # the first step computes more again
    assert sorted(span.key for span in spans) == sorted(op.key for op in listed)


def test_a_failure_after_the_last_step_is_raised_by_close(tmp_path, monkeypatch):
    failing_in_step(monkeypatch, "commit", 0, as_future=False)
    model = decoder(blocks=3)
    engine = holdfast.offload(model, adamw(model), tmp_path, precision="fp32")
    engine.step(batches(0, 1))
    with pytest.raises(Trouble, match="commit"):
        engine.close()
    engine.close()
    assert LocalStore.read(tmp_path).head().step == 0


def test_an_error_of_the_script_leaves_the_engine_closed_and_is_not_replaced(tmp_path):
    model = decoder(blocks=3)
    engine = holdfast.offload(model, adamw(model), tmp_path, precision="fp32")
    with pytest.raises(Trouble, match="in the script"), engine:
        engine.step(batches(0, 1))
        raise Trouble("in the script")
    assert not any(t.name.startswith("holdfast") for t in threading.enumerate())
    with pytest.raises(EngineFailed):
        engine.step(batches(0, 1))


# A device that goes on by itself


AHEAD = frozenset({(COMPUTE, COMPUTE), (UPLOAD, COMPUTE), (COMPUTE, DOWNLOAD)})


@pytest.fixture
def ahead(log):
    made = Executor(log, 1, lambda: None, AHEAD)
    yield made
    for future in log.futures.values():
        if not future.done():
            future.set_result(None)
    made.abort()
    made.close()


@pytest.mark.parametrize(
    "first, second, waits", [(UPLOAD, COMPUTE, False), (COMPUTE, DOWNLOAD, False), (DOWNLOAD, UPLOAD, True),
                             (DOWNLOAD, UPDATE, True), (COMPUTE, UPLOAD, True), (SSD_READ, UPLOAD, True)]
)  # fmt: skip
def test_what_waits_on_the_device_begins_when_what_it_needs_has_begun(ahead, log, first, second, waits):
    log.futures["first"] = Future()
    listed = [op("first", first), op("second", second, needs=["first"]), op("end")]
    runner = threading.Thread(target=ahead.run, args=(listed, STEP))
    runner.start()
    log.wait_for("first ends")
    if waits:
        time.sleep(0.02)
        assert "second begins" not in log.events
        log.futures["first"].set_result(None)
    log.wait_for("second ends")
    runner.join()


def test_a_computation_follows_the_one_before_it_and_waits_for_room(ahead, log):
    """What it needs besides is what another computation gives back: that has to be over."""
    log.futures |= {name: Future() for name in "abc"}
    listed = [op("a"), op("b", needs=["a"]), op("c", needs=["b", "a"])]
    runner = threading.Thread(target=ahead.run, args=(listed, STEP))
    runner.start()
    log.wait_for("b ends")
    time.sleep(0.02)
    assert "c begins" not in log.events
    log.futures["a"].set_result(None)
    runner.join(10)
    assert "c ends" in log.events and not log.futures["b"].done()


def test_a_list_is_over_when_the_device_is(ahead, log):
    log.futures["a"] = Future()
    ahead.run([op("a"), op("update", UPDATE, needs=["a"])], STEP)
    drained = threading.Thread(target=ahead.drain)
    drained.start()
    time.sleep(0.02)
    assert drained.is_alive() and "update begins" not in log.events
    log.futures["a"].set_result(None)
    drained.join(10)
    assert not drained.is_alive() and log.events[-1] == "update ends"


def test_an_error_of_the_device_is_raised_at_the_next_computation(ahead, log):
    log.futures["copy"] = Future()
    log.futures["copy"].set_exception(Trouble("lost"))
    with pytest.raises(Trouble, match="lost"):
        ahead.run([op("copy", UPLOAD), op("a", needs=["copy"]), op("b", needs=["a"])], STEP)
    assert "b begins" not in log.events


def test_operations_of_a_device_lane_last_from_the_end_of_the_one_before(ahead, log):
    log.futures |= {name: Future() for name in "ab"}
    ahead.spans = []
    ahead.run([op("a"), op("b", needs=["a"])], STEP)
    time.sleep(0.01)
    for name in "ab":
        log.futures[name].set_result(None)
    ahead.drain()
    a, b = ahead.spans
    assert b.start >= a.end > a.start
