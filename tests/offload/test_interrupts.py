"""A key press during a step takes effect at the next safe point."""

from __future__ import annotations

import gc
import signal
import threading

import pytest

import holdfast
from holdfast.io.queue import IOQueue
from holdfast.measure import drive_rates
from holdfast.offload import exit_hook
from holdfast.offload.exit_hook import deferred
from training import adamw, batches, decoder


def test_a_press_is_noted_and_raised_at_the_next_safe_point():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred() as safe_point:
        safe_point()
        signal.raise_signal(signal.SIGINT)
        reached.append("after the press")
        safe_point()
        reached.append("after the safe point")
    assert reached == ["after the press"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_after_the_last_safe_point_is_raised_at_the_end():
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)


def test_a_second_press_is_raised_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first"]


def test_an_error_is_not_replaced_by_a_press():
    with pytest.raises(LookupError), deferred():
        signal.raise_signal(signal.SIGINT)
        raise LookupError


def test_a_handler_of_the_callers_own_stays():
    pressed = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with deferred() as safe_point:
            signal.raise_signal(signal.SIGINT)
            safe_point()
        assert pressed == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_on_another_thread_signals_are_not_touched():
    def enter():
        with deferred() as safe_point:
            safe_point()
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


@pytest.fixture
def press_at(monkeypatch):
    """Lets a key be pressed as the ``n``-th thread that the main one starts from then on is there."""
    start, left = threading.Thread.start, [0]

    def starting(thread):
        start(thread)
        if threading.current_thread() is threading.main_thread():
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)

    def press_at(n):
        left[0] = n

    monkeypatch.setattr(threading.Thread, "start", starting)
    return press_at


def ours():
    return {thread for thread in threading.enumerate() if thread.name.startswith("holdfast")}


@pytest.mark.filterwarnings("ignore:the drives .* are on one file system")
def test_a_press_while_an_engine_is_made_leaves_no_thread_and_a_directory_to_begin_in(
    tmp_path, press_at, monkeypatch
):
    monkeypatch.setattr(drive_rates, "rate_of", lambda directory, limits: 1e9)
    before, pressed = ours(), 0
    for n in range(1, 100):
        model = decoder(blocks=2)
        press_at(n)
        try:
            engine = holdfast.offload(
                model, adamw(model), tmp_path / "run", io=holdfast.IO(drives=[tmp_path / "drive"])
            )
        except KeyboardInterrupt:
            pressed += 1
            assert ours() == before, n
            continue
        press_at(0)
        with engine:
            engine.step(batches(0, 1))
        break
    assert pressed >= 10 and ours() == before


def test_a_press_while_a_queue_is_made_leaves_no_thread(press_at):
    before = ours()
    for n in range(1, 5):
        press_at(n)
        with pytest.raises(KeyboardInterrupt):
            IOQueue(4)
        assert ours() == before


def test_engine_that_no_variable_names_is_finished_at_exit(tmp_path):
    def run():
        model = decoder(blocks=2)
        holdfast.offload(model, adamw(model), tmp_path, precision="fp32").step(batches(0, 1))

    before = set(exit_hook._open)
    run()
    gc.collect()
    (engine,) = set(exit_hook._open) - before
    engine.close()
    assert set(exit_hook._open) == before


def test_model_can_be_used_after_a_close_that_was_interrupted(tmp_path, monkeypatch):
    model = decoder(blocks=2)
    engine = holdfast.offload(model, adamw(model), tmp_path, precision="fp32")
    engine.step(batches(0, 1))
    executor, close = engine._executor, engine._executor.close

    def interrupted():
        close()
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    engine.close()
    assert model(**batches(1, 1)[0]).isfinite()
    engine._run.optimizer.close()
    engine._run.device.close()
    engine._run.store.queue.close()
    engine._run.store.close()
